"""The one maker of ATDP events: whose an event is, where it stands, its link, and the headers of its record.

Invariants: an event that is made here has no field of refine's (log time, source place and hash, governance), and its
body is plain; headers repeat what the event says, so that a reader need not decode it."""

from __future__ import annotations

from typing import NamedTuple

from millrace.schemas.chain import START, VERSION, LinkPrefix, event_hash
from millrace.schemas.ids import Micros
from millrace.schemas.records import Event, EventKind, Split

NO_STEP = -1
"""step of an event that belongs to no chain"""


class Belonging(NamedTuple):
    """Whose an event is. parent, spawn_call: the trajectory that spawned its own, and the tool call that did it;
    trace_id: 32 hex digits, where it was traced."""

    tenant: str
    policy: str
    group: str
    root: str
    trajectory: str
    attempt: str
    split: Split
    trace_id: str | None = None
    parent: str | None = None
    spawn_call: str | None = None


class EventNumber(NamedTuple):
    """Who numbers an event, in which incarnation, and its number; None: nobody does."""

    source: str
    epoch: int
    seq: int | None


class ChainLink(NamedTuple):
    """Where an event stands in the chain of its trajectory: its step, and the link of the event before it."""

    step: int = NO_STEP
    link: bytes = START


def draft(
    belonging: Belonging,
    kind: EventKind,
    body: bytes,
    *,
    id: str,
    actor: str,
    number: EventNumber,
    after: ChainLink,
    event_time: Micros,
    capture_time: Micros,
    parent_event: str | None = None,
    span_id: str | None = None,
) -> Event:
    """An event as it is captured, without its own link. body: the encoded record of its kind. Pure."""
    return {
        "id": id,
        "kind": kind,
        "tenant": belonging.tenant,
        "policy": belonging.policy,
        "group": belonging.group,
        "root_trajectory": belonging.root,
        "trajectory": belonging.trajectory,
        "parent_trajectory": belonging.parent,
        "parent_event": parent_event,
        "spawn_call": belonging.spawn_call,
        "attempt": belonging.attempt,
        "step": after.step,
        "actor": actor,
        "split": belonging.split,
        "event_time": event_time,
        "capture_time": capture_time,
        "log_time": None,
        "source": number.source,
        "source_epoch": number.epoch,
        "source_seq": number.seq,
        "prev_hash": after.link,
        "hash": b"",
        "hash_version": VERSION,
        "source_place": None,
        "source_hash": None,
        "trace_id": belonging.trace_id,
        "span_id": span_id,
        "governance": None,
        "body_encoding": "plain",
        "body": body,
    }


def link(event: Event, prefix: LinkPrefix | None = None) -> Event:
    """The event with its link, by the link before it that it names. prefix: what `chain.begin` made of it. Pure."""
    return {**event, "hash": event_hash(event["prev_hash"], event, prefix)}


def headers_of(event: Event, source: str | None = None) -> dict[str, str]:
    """The headers of an event's record in `raw`. source: the name under which readers keep a high-water mark, where it
    is another than the event's. Pure."""
    headers = {
        "id": event["id"],
        "kind": event["kind"],
        "policy": event["policy"],
        "group": event["group"],
        "trajectory": event["trajectory"],
        "source": event["source"] if source is None else source,
    }
    return headers if event["source_seq"] is None else headers | {"source-seq": str(event["source_seq"])}
