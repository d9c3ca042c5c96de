"""Episodes as events of `raw`, in the form in which the gateway makes them, with ids and numbers of their own.

Invariants: the events of a group follow, byte by byte, from what its rows say, from the terms, and from how many equal
groups were made before it; never from other rows, so refine skips them wherever they come again; each group is a source
with numbers of its own, and the events of an episode are one chain; a group whose events refine could not take is
refused here, by the name of the bound."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millrace.formats.episodes.episode import Episode, Group
from millrace.formats.episodes.event_bodies import IMPORT, Bodies
from millrace.formats.episodes.rows import BadRow
from millrace.formats.episodes.sealer import Kin, Sealer, headers_of
from millrace.infra.log.base import Outgoing
from millrace.infra.stages.letters import made_id
from millrace.schemas import bounds, codec
from millrace.schemas.records import Split

DRAFT = f"import-{made_id('import', 'draft')}"
"""the source under which a group is made to learn what it says"""


@dataclass(frozen=True, slots=True)
class ImportTerms:
    """What a command says of all its rows. split: that of rows which claim none; evaluation always stays."""

    topic: str
    policy: str
    tenant: str
    split: Split = "train"
    task: str = ""
    reward_key: str = ""


class Maker:
    """Makes the events of what one command imports, group after group. Remembers a digest of each."""

    def __init__(self, terms: ImportTerms) -> None:
        self._terms = terms
        self._equal = Counter[bytes]()

    def group(self, group: Group) -> list[Outgoing]:
        """The records of a group. Raises BadRow."""
        digest = content(self.draft(group))
        source = f"import-{made_id('import', digest.hex(), self._equal[digest])}"
        self._equal[digest] += 1
        return self._records(group, source)

    def draft(self, group: Group) -> list[Outgoing]:
        """Its records under a name that all groups share: what they say, and how long they are. Raises BadRow."""
        return self._records(group, DRAFT)

    def _records(self, group: Group, source: str) -> list[Outgoing]:
        out: list[Outgoing] = []
        size = 0
        for sample, episode in enumerate(group.episodes):
            for one in self._episode(source, sample, len(group.episodes), episode, len(out)):
                size += len(one.value or b"")
                if size > bounds.ROW_BYTES:
                    raise BadRow(
                        "row_too_large",
                        f"its events have more than {bounds.ROW_BYTES:,} bytes (ROW_BYTES): each reply is kept with "
                        "all that was said before it",
                    )
                out.append(one)
        return out

    def _episode(self, source: str, sample: int, size: int, episode: Episode, number: int) -> Iterator[Outgoing]:
        """The records of one episode, from a number on."""
        terms, id = self._terms, made_id("import", source, "trajectory", sample)
        kin = Kin(id, id if size == 1 else made_id("import", source, "group"), id, id)
        split: Split = "evaluation" if episode.split == "evaluation" else terms.split
        sealer = Sealer(terms.policy, terms.tenant, kin, split, episode.trace)
        for draft in Bodies(IMPORT, id, episode, size=size, sample=sample, task=terms.task).drafts():
            event = sealer.seal(draft, made_id("import", source, "event", number), source, 0, number)
            headers = headers_of(event, source, terms.reward_key)
            header_bytes = {name: text.encode() for name, text in headers.items()}
            yield Outgoing(
                terms.topic, f"{terms.tenant}/{kin.group}".encode(), codec.encode("Event", event), header_bytes
            )
            number += 1


def content(draft: Sequence[Outgoing]) -> bytes:
    """What a group says, as a digest of its draft. Pure."""
    digest = hashlib.sha256()
    for record in draft:
        digest.update(record.value or b"")
    return digest.digest()[:16]
