"""Is a raw record an event at all, and is it where it belongs?

A Refusal carries a machine-readable code and words without content; whatever it refuses becomes a dead letter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.bus.base import Record
from infra.chain import START, event_hash
from infra.topics import partition_of
from schemas import codec
from schemas.errors import CorruptRecord, UnknownSchema
from streams.words import Decoder, Unreadable


class Refusal(Unreadable):
    """Why a record is no event, with as much of the event as could be read."""

    def __init__(self, code: str, detail: str, event: Mapping[str, Any] | None = None) -> None:
        super().__init__(code, detail)
        self.event = event


def decode_event(record: Record, decode: Decoder) -> dict[str, Any]:
    """The event in a raw record. Raises Refusal."""
    try:
        name, event = decode(record)
    except Unreadable as error:
        raise Refusal(error.code, str(error)) from None
    if name != "Event":
        raise Refusal("not_an_event", f"a {name} does not belong into raw")
    return event


def check_place(record: Record, event: Mapping[str, Any], slots: int) -> None:
    """Raises Refusal for an event under another key than its own, or on another partition than its key's."""
    key = f"{event['tenant']}/{event['group']}".encode()
    if record.key != key or not event["tenant"] or not event["group"] or "/" in event["tenant"]:
        raise Refusal("wrong_key", "the record's key is not the event's tenant/group", event)
    if partition_of(key, slots) != record.partition:
        raise Refusal("wrong_partition", f"the key belongs on partition {partition_of(key, slots)}", event)


def decode_body(event: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a plain event. Raises Refusal."""
    if not event["body"]:
        raise Refusal("missing_body", "the event has no body", event)
    try:
        return codec.decode_body(event["kind"], event["body"])
    except UnknownSchema:
        raise Refusal("unknown_body", "no schema of this release has the body's fingerprint", event) from None
    except CorruptRecord:
        raise Refusal("undecodable_body", f"the body is no {event['kind']}", event) from None


def check_link(event: Mapping[str, Any]) -> None:
    """Raises Refusal when the event's hash is not the hash of what it holds, or a judge's event is chained."""
    if event["hash"] != event_hash(event["prev_hash"], event):
        raise Refusal("bad_hash", "the event's hash is not that of its content", event)
    if event["source_seq"] is None and event["prev_hash"] != START:
        raise Refusal("bad_chain", "an event without a source number belongs to no chain", event)
