"""The events of one trajectory that comes from elsewhere, and the headers of their records.

Invariants: the events of a trajectory are one chain; an envelope that refine could not take is refused here, by the
name of the bound, and then the chain stands where it stood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from millrace.formats.episodes.event_bodies import BareEvent
from millrace.formats.episodes.rows import BadRow
from millrace.infra import proof
from millrace.schemas import codec, envelope
from millrace.schemas.chain import START
from millrace.schemas.envelope import Belonging, ChainLink, EventNumber
from millrace.schemas.limits import beyond
from millrace.schemas.records import Event, Split


@dataclass(frozen=True, slots=True)
class Kin:
    """A trajectory and what it belongs to. spawn_call: the tool call of its parent that began it."""

    id: str
    group: str
    root: str
    attempt: str
    parent: str | None = None
    spawn_call: str | None = None


class Sealer:
    """Makes the events of one trajectory. trace: 32 hex digits, where it was traced; step, link: where the chain
    stands, from its start or from where an earlier process left it."""

    def __init__(
        self, policy: str, tenant: str, kin: Kin, split: Split, trace: str | None, step: int = 0, link: bytes = START
    ) -> None:
        self.step, self.link = step, link
        self._whose = Belonging(
            tenant=tenant,
            policy=policy,
            group=kin.group,
            root=kin.root,
            trajectory=kin.id,
            attempt=kin.attempt,
            split=split,
            trace_id=trace or kin.id.replace("-", ""),
            parent=kin.parent,
            spawn_call=kin.spawn_call,
        )

    def seal(self, draft: BareEvent, id: str, source: str, epoch: int, number: int) -> Event:
        """The next event. Raises BadRow."""
        event = envelope.draft(
            self._whose,
            draft.kind,
            codec.encode_body(draft.kind, cast(Any, draft.body)),
            id=id,
            actor=draft.actor,
            number=EventNumber(source, epoch, number),
            after=ChainLink(self.step, self.link),
            event_time=draft.at,
            capture_time=draft.at,
            span_id=draft.span,
        )
        excess = beyond("Event", event)
        if excess is not None:
            raise BadRow("out_of_bounds", excess)
        event = envelope.link(event)
        self.step, self.link = self.step + 1, event["hash"]
        return event


def headers_of(event: Event, source: str, reward_key: str) -> dict[str, str]:
    """The headers of an event's record. source: the name under which readers keep a high-water mark."""
    headers = envelope.headers_of(event, source)
    if event["kind"] == "reward" and reward_key:
        headers[proof.HEADER] = proof.proof_of(reward_key, event["hash"])
    return headers
