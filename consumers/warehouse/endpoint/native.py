"""Blocks of format Native, as the engine writes them without a protocol version and as clients of a newer protocol read
them: with a header before each block, and a byte after each column's type. clickhouse-go, and Grafana with it, asks for
that and reads nothing else. Pure.

    the engine writes: columns rows (name type data)*      such a client reads: INFO columns rows (name type 0 data)*

Invariant: the values are the engine's own bytes; only how long a column is has to be known, so a type of unknown length
is refused by name."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator

from millrace.consumers.warehouse.endpoint.faults import NOT_IMPLEMENTED, QueryError

FRAME_PROTOCOL = 54454
"""the protocol version from which on a column says how it is serialized. Clients of older ones (clickhouse-connect
names 54405) try first whether their version counts here, and read plain blocks when it does not."""
INFO = b"\x01\x00\x02\xff\xff\xff\xff\x00"
"""of a block: no overflow row, no bucket"""
PLAINLY = b"\x00"
"""a column is serialized in the ordinary way"""

_SIZES = {
    **dict.fromkeys(("Bool", "Int8", "UInt8", "Enum8", "Nothing"), 1),
    **dict.fromkeys(("Int16", "UInt16", "Enum16", "Date", "BFloat16"), 2),
    **dict.fromkeys(("Int32", "UInt32", "Float32", "Date32", "DateTime", "Time", "IPv4"), 4),
    **dict.fromkeys(("Int64", "UInt64", "Float64", "DateTime64", "Time64"), 8),
    **dict.fromkeys(("Int128", "UInt128", "UUID", "IPv6"), 16),
    **dict.fromkeys(("Int256", "UInt256"), 32),
}
_QUOTATION = re.compile(r"'(?:[^'\\]|\\.)*'|`(?:[^`\\]|\\.)*`")
_POINT = "Tuple(Float64, Float64)"
_SHAPES = {
    "Point": _POINT,
    **dict.fromkeys(("Ring", "LineString"), f"Array({_POINT})"),
    **dict.fromkeys(("Polygon", "MultiLineString"), f"Array(Array({_POINT}))"),
    "MultiPolygon": f"Array(Array(Array({_POINT})))",
}


class _MissingBytes(Exception):
    """The block goes on in bytes that have not come yet."""


def make_frame(pieces: Iterator[bytes]) -> Generator[bytes, None, None]:
    """The blocks in the pieces, each with what such a client reads. Raises QueryError for a column of a type whose
    length cannot be told."""
    rest = b""
    for piece in pieces:
        rest, out, at = rest + piece, bytearray(), 0
        while at < len(rest):
            try:
                block, at = _block(rest, at)
            except _MissingBytes:
                break
            out += block
        rest = rest[at:]
        if out:
            yield bytes(out)
    if rest:
        raise QueryError("the engine cut a block short. Report it.", 1002)


def _block(data: bytes, at: int) -> tuple[bytes, int]:
    """The block at `at`, frame, and where the next one begins."""
    out, start = bytearray(INFO), at
    columns, at = _number(data, at)
    rows, at = _number(data, at)
    for _ in range(columns):
        _, at = _text(data, at)
        kind, at = _text(data, at)
        out += data[start:at] + PLAINLY
        start = at
        if rows:
            dictionaries = _QUOTATION.sub("", kind).count("LowCardinality(")  # each says first which form it has
            at = _after(data, at + 8 * dictionaries, kind, rows)
        if at > len(data):
            raise _MissingBytes
    return bytes(out + data[start:at]), at


def _after(data: bytes, at: int, kind: str, rows: int) -> int:
    """Where the values of a column end that begin at `at`, behind what is written once for all of them."""
    name, _, inside = kind.partition("(")
    inside = inside[:-1]
    match name:
        case "String":
            return _after_texts(data, at, rows)
        case "Nullable":
            return _after(data, at + rows, inside, rows)
        case "Array" | "Map" | "Nested":
            of = inside if name == "Array" else f"Tuple({inside})"
            end = at + 8 * rows
            return _after(data, end, of, _uint64(data, end - 8) if rows else 0)
        case "Tuple":
            members = arguments(inside)
            for member in members:
                at = _after(data, at, _member_type(member), rows)
            return at if members else at + rows
        case "SimpleAggregateFunction":
            return _after(data, at, arguments(inside)[1], rows)
        case "LowCardinality":
            return _after_dictionary(data, at, inside, rows)
        case "FixedString":
            return at + int(inside) * rows
        case "Decimal":
            digits = int(inside.partition(",")[0])
            return at + rows * (4 if digits < 10 else 8 if digits < 19 else 16 if digits < 39 else 32)
    if name in _SHAPES:
        return _after(data, at, _SHAPES[name], rows)
    size = 8 if name.startswith("Interval") else _SIZES.get(name)
    if size is None:
        raise QueryError(
            f"a column of type {kind} is not served to this client: write toString(...) around it.", NOT_IMPLEMENTED
        )
    return at + size * rows


def _after_dictionary(data: bytes, at: int, kind: str, rows: int) -> int:
    """LowCardinality: how wide a reference is, the different values, a reference to one for each row."""
    if not rows:
        return at
    width = 1 << (_uint64(data, at) & 3)
    values = _uint64(data, at + 8)
    inner = kind.removeprefix("Nullable(").removesuffix(")") if kind.startswith("Nullable(") else kind
    return _after(data, at + 16, inner, values) + 8 + width * rows


def _after_texts(data: bytes, at: int, rows: int) -> int:
    try:
        for _ in range(rows):
            size = data[at]
            at += 1
            if size > 127:
                size, at = _number(data, at - 1)
            at += size
    except IndexError:
        raise _MissingBytes from None
    return at


def _text(data: bytes, at: int) -> tuple[str, int]:
    size, at = _number(data, at)
    if at + size > len(data):
        raise _MissingBytes
    return data[at : at + size].decode(), at + size


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A length of seven bits a byte, the lowest first, and where it ends."""
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
    raise _MissingBytes


def _uint64(data: bytes, at: int) -> int:
    if at + 8 > len(data):
        raise _MissingBytes
    return int.from_bytes(data[at : at + 8], "little")


def _member_type(member: str) -> str:
    """The type of a member of a tuple, which may have a name before it."""
    quote = member[:1]
    if quote in ("`", '"'):
        end = 1
        while member[end] != quote:
            end += 2 if member[end] == "\\" else 1
        return member[end + 2 :]
    head, space, rest = member.partition(" ")
    return rest if space and not set(head) & set("(,'") else member


def arguments(inside: str) -> list[str]:
    """The arguments of a type, at its uppermost level."""
    out, now, depth, quote, at = [], "", 0, "", 0
    while at < len(inside):
        sign = inside[at]
        if quote and sign == "\\":
            sign = inside[at : at + 2]
        elif quote:
            quote = "" if sign == quote else quote
        elif sign in "'`\"":
            quote = sign
        elif sign in "()":
            depth += 1 if sign == "(" else -1
        at += len(sign)
        if sign == "," and not depth and not quote:
            out.append(now.strip())
            now = ""
        else:
            now += sign
    return [*out, now.strip()] if now.strip() else out
