"""Is a raw record an event at all, and is it where it belongs?

A Refusal carries a machine-readable code and words without content; whatever it refuses becomes a dead letter."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from millrace.infra.log.base import Record
from millrace.infra.log.topics import partition_of
from millrace.infra.proof import HEADER, proven
from millrace.schemas import arrays, codec
from millrace.schemas.chain import START, event_hash
from millrace.schemas.errors import CorruptRecord, UnknownSchema
from millrace.schemas.limits import beyond, beyond_body
from millrace.schemas.records import Array, Body, Event, Reward
from millrace.schemas.registry import AvroType, current
from millrace.streams.decoding import Decoder, Unreadable
from millrace.streams.refine.strings import ARRAY, Step


class Refusal(Unreadable):
    """Why a record is no event, with as much of the event as could be read."""

    def __init__(self, code: str, detail: str, event: Event | None = None) -> None:
        super().__init__(code, detail)
        self.event = event


def decode_event(record: Record, decode: Decoder) -> Event:
    """The event in a raw record. Raises Refusal."""
    try:
        name, event = decode(record)
    except Unreadable as error:
        raise Refusal(error.code, str(error)) from None
    if name != "Event":
        raise Refusal("not_an_event", f"a {name} does not belong into raw")
    return cast(Event, event)


def check_place(record: Record, event: Event, slots: int) -> None:
    """Raises Refusal for an event under another key than its own, on another partition than its key's, or with a name
    or number beyond its bound."""
    key = f"{event['tenant']}/{event['group']}".encode()
    if record.key != key or not event["tenant"] or not event["group"] or "/" in event["tenant"]:
        raise Refusal("wrong_key", "the record's key is not the event's tenant/group", event)
    if partition_of(key, slots) != record.partition:
        raise Refusal("wrong_partition", f"the key belongs on partition {partition_of(key, slots)}", event)
    _check_bounds(beyond("Event", event), event)


def decode_body(event: Event) -> Body:
    """The body of a plain event, within its bounds. Raises Refusal."""
    if not event["body"]:
        raise Refusal("missing_body", "the event has no body", event)
    try:
        body = codec.decode_body(event["kind"], event["body"])
    except UnknownSchema:
        raise Refusal("unknown_body", "no schema of this release has the body's fingerprint", event) from None
    except CorruptRecord:
        raise Refusal("undecodable_body", f"the body is no {event['kind']}", event) from None
    fields = cast(Mapping[str, Any], body)
    if not all(_is_array(fields[name]) for name in _arrays(event["kind"])):
        raise Refusal("undecodable_body", "an array of the body is of no type that is stored, or ragged", event)
    _check_bounds(beyond_body(event["kind"], body), event)
    return body


def _check_bounds(fault: str | None, event: Event) -> None:
    if fault is not None:
        raise Refusal("out_of_bounds", fault, event)


@cache
def _arrays(kind: str) -> tuple[str, ...]:
    """The fields of a body that are arrays."""
    fields = current(codec.BODIES[kind]).definition["fields"]
    return tuple(field["name"] for field in fields if ARRAY in _names(field["type"]))


def _names(kind: AvroType) -> list[str]:
    """The records that a type may be, by name."""
    if isinstance(kind, list):
        return [name for part in kind for name in _names(part)]
    return [kind if isinstance(kind, str) else kind.get("name", "")]


def _is_array(part: Array | None) -> bool:
    if part is None:
        return True
    dtype = arrays.DTYPES.get(part["dtype"])
    return dtype is not None and len(part["data"]) % dtype.itemsize == 0


def _number(step: Step) -> int:
    """The number of an item or entry, 0 for a field."""
    return 0 if isinstance(step, str) else step if isinstance(step, int) else step[1]


def check_link(event: Event) -> None:
    """Raises Refusal when the event's hash is not the hash of what it holds, or a judge's event is chained."""
    if event["hash"] != event_hash(event["prev_hash"], event):
        raise Refusal("bad_hash", "the event's hash is not that of its content", event)
    if event["source_seq"] is None and event["prev_hash"] != START:
        raise Refusal("bad_chain", "an event without a source number belongs to no chain", event)


def check_replay(event: Event, body: Body | None) -> None:
    """Raises Refusal for a reward that says that a replay made it, where a numbered source sent it: a gateway speaks
    for live episodes alone, and seal would pass over what it sends."""
    is_replay = event["kind"] == "reward" and body is not None and cast(Reward, body)["replay"] is not None
    if is_replay and event["source_seq"] is not None:
        raise Refusal("live_replay", "a reward of a live source says that a replay made it", event)


def check_proof(record: Record, event: Event, key: str) -> None:
    """Raises Refusal for a reward that nobody signed who may give one. Without a key anyone may."""
    if key and event["kind"] == "reward" and not proven(key, event["hash"], record.headers.get(HEADER)):
        raise Refusal("unproven_reward", "no holder of [reward] key signed it", event)
