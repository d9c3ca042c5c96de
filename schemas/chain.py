"""The hash chains over events: one per trajectory, written by the gateway, and one per slot of `events`, by refine.

Which link is made when: the gateway's covers the event as captured, so log time, source place and governance are null
under it; refine checks it, sets those fields and links the event as governed into the chain of its slot, which covers
them too. `source_hash` ties the second link to the first.

Invariants: a link covers the bytes that are stored, never the plain text behind them, so that destroying a subject's
key breaks no proof; no two events share a preimage; a link of version 2 covers every field of the schema but the hash
itself; a field at its default is left out, so that a later schema with more fields gives an old event the same link."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec

from millrace.schemas.records import Event
from millrace.schemas.registry import AvroSchema, AvroType, current

START = b""
"""prev_hash of the first event of a chain"""
VERSION = 2
"""the version of every link that is made today; events that lack one were linked by version 1"""

_PURPOSE = b"millrace event 2\0"
_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_NO_DEFAULT = object()
Canonical = Callable[[Any], object]
CanonicalRecord = Callable[[Mapping[str, object]], dict[str, object]]

LONG = 1 << 16
"""bytes of a body from which on a link may be begun before its event has a place in the chain"""


class LinkPrefix(NamedTuple):
    """A link up to the end of its event's body: `before` is what stands before that body, `digest` covers both."""

    before: bytes
    digest: hashlib._Hash


def begin(event: Event) -> LinkPrefix:
    """The long part of a link of version 2, which is the same wherever in its chain the event will stand: any thread
    may make it. Raises ValueError for a body of less than `LONG` bytes."""
    before, _ = _around_body(_event()(event), len(event["body"]))
    digest = hashlib.sha256(_PURPOSE + before)
    digest.update(event["body"])
    return LinkPrefix(before, digest)


def event_hash(prev: bytes, event: Event, prefix: LinkPrefix | None = None) -> bytes:
    """The 32-byte link after `prev` of a `schemas` Event, by the event's own `hash_version`.

    `prev` is the former link of the same chain, or START. `prefix`: what `begin` made of the same body; where the event
    has changed in front of it, the link is made anew."""
    if event.get("hash_version", 1) == 1:
        return _identity_hash(prev, event)
    fields = _event()(event) | {"prev_hash": prev}
    if prefix is not None:
        before, behind = _around_body(fields, len(event["body"]))
        if before == prefix.before:
            digest = prefix.digest.copy()
            digest.update(behind)
            return digest.digest()
    digest = hashlib.sha256(_PURPOSE)
    digest.update(_encode(fields))  # apart: an event may have megabytes
    return digest.digest()


def _around_body(fields: Mapping[str, object], size: int) -> tuple[bytes, bytes]:
    """How an event's canonical fields are written before and behind the bytes of its body."""
    if size < LONG:
        raise ValueError(f"a body of {size} bytes is not begun ahead of its link")
    data = _encode({**fields, "body": b""})
    start = 1 if len(fields) < 16 else 3  # how many fields follow
    start += sum(len(_encode(name)) + len(_encode(fields[name])) for name in fields if name < "body")
    start += len(_encode("body"))
    return data[:start] + struct.pack(">BI", 0xC6, size), data[start + len(_encode(b"")) :]


def _identity_hash(prev: bytes, event: Event) -> bytes:
    """Version 1: the identity and the body alone, each length-prefixed."""
    digest = hashlib.sha256()
    for part in (
        prev,
        event["id"].encode(),
        event["kind"].encode(),
        event["trajectory"].encode(),
        struct.pack("<q", event["step"]),
        event["body"],
    ):
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return digest.digest()


@cache
def _event() -> CanonicalRecord:
    schema = current("Event").definition
    return _record({**schema, "fields": [field for field in schema["fields"] if field["name"] != "hash"]}, {})


def _record(schema: AvroSchema, by_name: dict[str, Canonical]) -> CanonicalRecord:
    """What a record's fields are without those at their default."""
    fields = [
        (field["name"], field.get("default", _NO_DEFAULT), _of(field["type"], by_name)) for field in schema["fields"]
    ]

    def canonical(record: Mapping[str, object]) -> dict[str, object]:
        out = {}
        for name, default, inner in fields:
            value = record.get(name, default)
            if value is not default and value != default:
                out[name] = value if inner is None else inner(value)
        return out

    by_name[schema["name"]] = canonical
    return canonical


def _of(kind: AvroType, by_name: dict[str, Canonical]) -> Canonical | None:
    """How a value of a type becomes canonical; None where it is canonical as it is."""
    if isinstance(kind, list):
        inner = [
            canonical
            for canonical in (_of(member, by_name) for member in kind if member != "null")
            if canonical is not None
        ]
        return _unless_none(inner[0]) if inner else None
    if isinstance(kind, str):
        return by_name.get(kind)
    match kind["type"]:
        case "record":
            return _record(kind, by_name)
        case "array":
            item = _of(kind["items"], by_name)
            return None if item is None else lambda values: [item(value) for value in values]
        case "map":
            value_of = _of(kind["values"], by_name)
            return None if value_of is None else lambda table: {name: value_of(table[name]) for name in table}
        case _:
            return None


def _unless_none(inner: Canonical) -> Canonical:
    return lambda value: None if value is None else inner(value)
