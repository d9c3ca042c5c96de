"""Rows of a table as an Avro object file, made of the log's own bytes: nothing is decoded on the way.

A record of the log is Avro already, so a row is its bytes behind its offset and time, in a file whose schema is the
record's with these two in front. An event's body is Avro inside Avro: it is laid open by dropping its length, as a
branch of a union of all bodies.

Invariant: rows cannot run into each other unseen. Behind each lies a number that nobody could know when the record was
written, and a file in which one of them is not where it belongs is refused as a whole.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from millrace.consumers.warehouse.store.base import Insertion
from millrace.consumers.warehouse.store.columns import backtick, schema_of, text
from millrace.consumers.warehouse.store.tables import PLACE, RecordTable
from millrace.schemas import codec
from millrace.schemas.registry import BODIES, NAMESPACE, current

CHECK = 8
"""bytes of the number behind each row"""
LATEST_MS = 10_413_791_999_999
"""the last moment that a DateTime64 and its month hold"""
PLACE_FORMAT = struct.Struct("<Qq")


def with_place(offset: int, timestamp: int) -> bytes:
    """What a row begins with: offset and time in millis, from a time in micros; a time that no table holds is the
    nearest that one does."""
    return PLACE_FORMAT.pack(offset, millis(timestamp))


def millis(timestamp: int) -> int:
    """Micros of a record as millis that a table holds."""
    return min(max(timestamp // 1000, 0), LATEST_MS)


@dataclass(frozen=True, slots=True)
class Frame:
    """The file of some rows of a table that lie in one partition. `pieces` are its bytes."""

    into: Insertion
    pieces: Sequence[bytes]


def make_frame(table: RecordTable, topic: str, part: int, rows: Sequence[bytes], *, dry: bool = False) -> Frame:
    """The file of `rows`: of each, what `with_place` gives and the Avro of its record. dry: it is inserted nowhere, to
    see whether the engine can read it."""
    check = os.urandom(CHECK)
    data = check.join(rows) + check
    block = (_long(len(rows)), _long(len(data)), data, _SYNC)
    return Frame(_insertion(table, topic, part, check, dry), (_head(table.record), *block))


def _insertion(table: RecordTable, topic: str, part: int, check: bytes, dry: bool) -> Insertion:
    names, values, structure = _reading(table.record)
    place = {
        "topic": text(topic),
        "part": str(part),
        "off": "reinterpretAsUInt64(`_off`)",
        "logged": "fromUnixTimestamp64Milli(reinterpretAsInt64(`_logged`), 'UTC')",
    }
    into = table.full_name
    if dry:
        columns = ", ".join(f"{backtick(column.name)} {column.type}" for column in table.columns)
        into = f"FUNCTION null({text(columns)})"
    where = f"throwIf(`_check` != toFixedString(unhex('{check.hex()}'), {CHECK}), 'a record ends elsewhere') = 0"
    return Insertion(into, () if dry else names, (*place.values(), *values), structure, where)


@cache
def _reading(record: str) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Names of all columns, values of those behind the place, and what is read."""
    columns = RecordTable("", record, (), "").columns
    reads = dict.fromkeys(read for column in columns for read in column.reads)
    additions = [("_off", "FixedString(8)"), ("_logged", "FixedString(8)"), ("_check", f"FixedString({CHECK})")]
    structure = ", ".join(f"{backtick(path)} {kind}" for path, kind in (*additions, *reads))
    return tuple(column.name for column in columns), tuple(c.value for c in columns[len(PLACE) :]), structure


# -- the file

_SYNC = b"millrace rows..."
assert len(_SYNC) == 16


@cache
def _head(record: str) -> bytes:
    """The beginning of a file of rows of a record."""
    types: set[str] = set()
    fields = [_field("_off", "fixed8", types), _field("_logged", "fixed8", types)]
    for field in schema_of(record)["fields"]:
        if (record, field["name"]) == ("Event", "body"):
            kind: Any = ["null", *(_full_type(f"{NAMESPACE}.{body}", types) for body in BODIES.values())]
        else:
            kind = _full_type(field["type"], types)
        fields.append({"name": field["name"], "type": kind})
    fields.append(_field("_check", "fixed8", types))
    schema = json.dumps({"type": "record", "name": "Row", "namespace": NAMESPACE, "fields": fields}).encode()
    meta = b"".join(_bytes(part) for part in (b"avro.schema", schema, b"avro.codec", b"null"))
    return b"Obj\x01" + _long(2) + meta + _long(0) + _SYNC


def _field(name: str, kind: str, types: set[str]) -> dict[str, Any]:
    """A field of 8 bytes as they are."""
    avro_type: Any = kind if kind in types else {"type": "fixed", "name": kind, "size": CHECK}
    types.add(kind)
    return {"name": name, "type": avro_type}


def _full_type(kind: Any, types: set[str]) -> Any:
    """A type with every named type in it spelled out where it stands first, without documentation."""
    match kind:
        case list():
            return [_full_type(part, types) for part in kind]
        case {"type": "array", "items": items}:
            return {"type": "array", "items": _full_type(items, types)}
        case {"type": "map", "values": values}:
            return {"type": "map", "values": _full_type(values, types)}
        case str() if kind.startswith(f"{NAMESPACE}.") and kind not in types:
            types.add(kind)
            schema = schema_of(kind)
            name = kind.removeprefix(f"{NAMESPACE}.")
            if schema["type"] == "enum":
                return {"type": "enum", "name": name, "symbols": schema["symbols"]}
            fields = [{"name": part["name"], "type": _full_type(part["type"], types)} for part in schema["fields"]]
            return {"type": "record", "name": name, "fields": fields}
        case _:
            return kind


def _bytes(data: bytes) -> bytes:
    return _long(len(data)) + data


@lru_cache(maxsize=65_536)
def _long(value: int) -> bytes:
    """Avro's long."""
    rest, out = (value << 1) ^ (value >> 63), bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


# -- events

BRANCH = {codec.MARK + current(body).fingerprint: _long(number) for number, body in enumerate(BODIES.values(), start=1)}
"""what the bytes of a body begin with -> its branch in the union of bodies"""
NO_BODY = _long(0)


def split_plain_event(value: bytes) -> tuple[bytes, bytes, bytes] | None:
    """The bytes of an Event with its body laid open: envelope, branch and body. None where the body is not one that
    this release writes.

    The body is the last field, so it ends with the record and its length stands before it. Only bytes fields of the
    envelope could hold the same by design, and those are hashes."""
    at = value.find(codec.MARK, codec.HEAD)
    while at >= 0:
        branch = BRANCH.get(value[at : at + codec.HEAD])
        if branch is not None:
            length = _long(len(value) - at)
            if value.endswith(length, codec.HEAD, at):
                return value[codec.HEAD : at - len(length)], branch, value[at + codec.HEAD :]
        at = value.find(codec.MARK, at + 2)
    return None
