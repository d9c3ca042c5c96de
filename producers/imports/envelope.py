"""The envelope of an event: whose it is, its place in the chain of its trajectory, and the headers of its record.

Invariants: the events of a trajectory are one chain; an envelope that refine could not take is refused here, by the
name of the bound, and then the chain stands where it stood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from millrace.infra import proof
from millrace.producers.imports.bodies import BareEvent
from millrace.producers.imports.rows import BadRow
from millrace.schemas import codec
from millrace.schemas.chain import START, VERSION, event_hash
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
        self._policy, self._tenant, self._kin, self._split, self._trace = policy, tenant, kin, split, trace

    def sealed(self, draft: BareEvent, id: str, source: str, epoch: int, number: int) -> Event:
        """The next event. Raises BadRow."""
        kin = self._kin
        event: Event = {
            "id": id,
            "kind": draft.kind,
            "tenant": self._tenant,
            "policy": self._policy,
            "group": kin.group,
            "root_trajectory": kin.root,
            "trajectory": kin.id,
            "parent_trajectory": kin.parent,
            "parent_event": None,
            "spawn_call": kin.spawn_call,
            "attempt": kin.attempt,
            "step": self.step,
            "actor": draft.actor,
            "split": self._split,
            "event_time": draft.at,
            "capture_time": draft.at,
            "log_time": None,
            "source": source,
            "source_epoch": epoch,
            "source_seq": number,
            "prev_hash": self.link,
            "hash": b"",
            "hash_version": VERSION,
            "source_place": None,
            "source_hash": None,
            "trace_id": self._trace or kin.id.replace("-", ""),
            "span_id": draft.span,
            "governance": None,
            "body_encoding": "plain",
            "body": codec.encode_body(draft.kind, cast(Any, draft.body)),
        }
        found = beyond("Event", event)
        if found is not None:
            raise BadRow("out_of_bounds", found)
        event["hash"] = event_hash(self.link, event)
        self.step, self.link = self.step + 1, event["hash"]
        return event


def headers_of(event: Event, source: str, reward_key: str) -> dict[str, str]:
    """The headers of an event's record. source: the name under which readers keep a high-water mark."""
    headers = {
        "id": event["id"],
        "kind": event["kind"],
        "policy": event["policy"],
        "group": event["group"],
        "trajectory": event["trajectory"],
        "source": source,
        "source-seq": str(event["source_seq"]),
    }
    if event["kind"] == "reward" and reward_key:
        headers[proof.HEADER] = proof.proof_of(reward_key, event["hash"])
    return headers
