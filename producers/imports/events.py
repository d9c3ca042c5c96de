"""Episodes as events of `raw`, in the form in which the gateway makes them, with ids and numbers of their own.

Invariants: an event follows from the rows, the terms and its number alone, byte by byte, so whoever sends a number
again sends the same and refine skips it; each group is one run of numbers, and the events of an episode are one chain;
a group whose events refine could not take is refused here, by the name of the bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from millrace.infra.log.base import Outgoing
from millrace.infra.stages.letters import made_id
from millrace.producers.imports.bodies import IMPORT, Bodies
from millrace.producers.imports.envelope import Kin, Sealer, headers_of
from millrace.producers.imports.episode import Episode, Group
from millrace.producers.imports.rows import BadRow
from millrace.schemas import bounds, codec
from millrace.schemas.records import Split


@dataclass(frozen=True, slots=True)
class Terms:
    """What a command says of all its rows. split: that of rows which claim none; evaluation always stays."""

    topic: str
    policy: str
    tenant: str
    split: Split = "train"
    task: str = ""
    reward_key: str = ""


class Maker:
    """Makes the events of one source, group after group. `made` counts kinds."""

    def __init__(self, source: str, terms: Terms) -> None:
        self.source = source
        self.terms = terms
        self.number = 0
        """of the next event"""
        self.groups = 0

    def group(self, group: Group) -> list[Outgoing]:
        """The records of a group. Raises BadRow, and then nothing was numbered."""
        name = made_id("import", self.source, "group", self.groups)
        out: list[Outgoing] = []
        size = 0
        for sample, episode in enumerate(group.episodes):
            for one in self._records(name, sample, len(group.episodes), episode, self.number + len(out)):
                size += len(one.value or b"")
                if size > bounds.ROW_BYTES:
                    raise BadRow(
                        "row_too_large",
                        f"its events have more than {bounds.ROW_BYTES:,} bytes (ROW_BYTES): each reply is kept with "
                        "all that was said before it",
                    )
                out.append(one)
        self.number += len(out)
        self.groups += 1
        return out

    def _records(self, group: str, sample: int, size: int, episode: Episode, number: int) -> Iterator[Outgoing]:
        """The records of one episode, from a number on."""
        terms, id = self.terms, made_id("import", self.source, "trajectory", self.groups, sample)
        kin = Kin(id, id if size == 1 else group, id, id)
        split: Split = "evaluation" if episode.split == "evaluation" else terms.split
        sealer = Sealer(terms.policy, terms.tenant, kin, split, episode.trace)
        for draft in Bodies(IMPORT, id, episode, size=size, sample=sample, task=terms.task).drafts():
            event = sealer.sealed(draft, made_id("import", self.source, "event", number), self.source, 0, number)
            headers = headers_of(event, self.source, terms.reward_key)
            encoded = {name: said.encode() for name, said in headers.items()}
            yield Outgoing(terms.topic, f"{terms.tenant}/{kin.group}".encode(), codec.encode("Event", event), encoded)
            number += 1
