"""Records to bytes and back: Avro single-object encoding (C3 01, 8-byte fingerprint, body), so no registry is needed.

Invariants: what `encode` wrote, `decode` of this and of every later release reads (older writers through
`schemas/history`); `decode` never returns a record that does not fit today's schema; no key of a record is dropped in
silence, at any depth.

`encode`, `decode_as`, `encode_body` and `decode_body` are typed by the literal name or kind that they are given (the
types are generated, in `records`), so that the type checker finds a misspelt key. `encode_by_name` and `decode_by_name`
are the same functions for callers that learn the name at run time."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import cache
from typing import Any

from fastavro import schemaless_reader, schemaless_writer

from millrace.schemas.errors import CorruptRecord
from millrace.schemas.records import DecodeAs, DecodeBody, Encode, EncodeBody
from millrace.schemas.registry import BODIES as BODIES
from millrace.schemas.registry import Schema, by_fingerprint, current
from millrace.schemas.strict import Check, check_of

MARK = b"\xc3\x01"
HEAD = len(MARK) + 8


@cache
def _head(name: str) -> tuple[bytes, Schema, Check]:
    schema = current(name)
    return MARK + schema.fingerprint, schema, check_of(schema.definition)


def encode_by_name(name: str, record: Mapping[str, object]) -> bytes:
    """The bytes of a record. Raises UnknownKey for a key that its schema does not have, CorruptRecord for whatever else
    does not fit the schema, UnknownSchema for a foreign name."""
    head, schema, check = _head(name)
    out = io.BytesIO()
    out.write(head)
    try:
        check(record)
        schemaless_writer(out, schema.avro, record)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise CorruptRecord(f"not a {name}: {type(error).__name__}: {error}") from error
    return out.getvalue()


def decode(data: bytes) -> tuple[str, dict[str, Any]]:
    """(record name, record). Raises UnknownSchema for a foreign fingerprint, CorruptRecord for anything else."""
    if data[:2] != MARK or len(data) < HEAD:
        raise CorruptRecord("not a single-object encoded Avro record (it must start with C3 01)")
    writer = by_fingerprint(bytes(data[2:HEAD]))
    stream = io.BytesIO(data)
    stream.seek(HEAD)
    reader = current(writer.name)
    try:
        record: Any = schemaless_reader(stream, writer.avro, None if reader is writer else reader.avro)
    except (
        Exception
    ) as error:  # fastavro raises whatever a broken byte leads to: EOFError, IndexError, UnicodeDecodeError...
        raise CorruptRecord(f"bytes of a {writer.name} do not decode: {type(error).__name__}: {error}") from error
    if stream.tell() != len(data):
        raise CorruptRecord(f"{len(data) - stream.tell()} bytes follow a {writer.name}")
    return writer.name, record


def decode_by_name(name: str, data: bytes) -> Any:
    """The record, which must be a `name`. Raises CorruptRecord when it is another."""
    record_name, record = decode(data)
    if record_name != name:
        raise CorruptRecord(f"expected a {name}, found a {record_name}")
    return record


def name_of(data: bytes) -> str:
    """The record name behind encoded bytes, without decoding them. Raises like `decode`."""
    if data[:2] != MARK or len(data) < HEAD:
        raise CorruptRecord("not a single-object encoded Avro record (it must start with C3 01)")
    return by_fingerprint(bytes(data[2:HEAD])).name


def _encode_body(kind: str, body: Mapping[str, object]) -> bytes:
    """The stored bytes of an event body of this kind."""
    return encode_by_name(BODIES[kind], body)


encode: Encode = encode_by_name
decode_as: DecodeAs = decode_by_name
encode_body: EncodeBody = _encode_body
decode_body: DecodeBody = lambda kind, data: decode_by_name(BODIES[kind], data)  # noqa: E731
"""Raises CorruptRecord when the bytes are another kind's."""
