"""How deep JSON nests, how many values it holds, and whether it is text, told from its bytes before anyone parses it.

A parser builds an object for each value and holds the interpreter's lock while it does: eight megabytes of `[],[],[]`
would stop every other call for a second. The count here takes a few passes of numpy, which let others run meanwhile.

Invariants: for JSON the depth is exact and the count is never below the number of values; text that is no JSON gets
some answer and the parser refuses it; what passes `check` is UTF-8, and safe to parse, to walk by recursion and to
write again."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import msgspec
import numpy as np
import orjson

from millrace.dialects.errors import ApiError, bad_request
from millrace.schemas import bounds

QUOTE, COMMA, COLON = b'",:'
OPEN, CLOSE = b"{}"
LOWER = 0x20
"""the bit that makes a brace of a bracket"""
_HALF = re.compile("[\ud800-\udfff]")


class JsonShape(NamedTuple):
    """Levels of maps and lists, and values: maps, lists, their entries, names in maps."""

    depth: int
    values: int


def measure(text: bytes) -> JsonShape:
    """The shape of JSON text."""
    # Without escapes every quote opens or closes a string.
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    data = np.frombuffer(text, np.uint8)
    outside = (np.cumsum(data == QUOTE, dtype=np.uint8) & 1) == 0
    letters = data | LOWER
    opening, closing = outside & (letters == OPEN), outside & (letters == CLOSE)
    separators = outside & ((data == COMMA) | (data == COLON))
    steps = (opening.view(np.int8) - closing.view(np.int8))[opening | closing]
    depth = int(np.cumsum(steps, dtype=np.int32).max(initial=0))
    return JsonShape(depth, int(np.count_nonzero(separators)) + int(np.count_nonzero(opening)) + 1)


def unwieldy(text: str | bytes) -> bool:
    """Whether JSON text, as arguments of a tool are, nests deeper or holds more values than anything here is looked
    into."""
    data = text if isinstance(text, bytes) else text.encode(errors="replace")
    if data.count(b"[") + data.count(b"{") <= bounds.DEPTH and len(data) <= bounds.VALUES:
        return False
    shape = measure(data)
    return shape.depth > bounds.DEPTH or shape.values > bounds.VALUES


def object_in(text: bytes) -> dict[str, Any] | None:
    """The JSON object that a server's answer is; None for anything else, and for what is unwieldy."""
    try:
        value = None if unwieldy(text) else orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def check(body: bytes) -> None:
    """Raises ApiError 400 for a body that is no UTF-8, or has too many levels or values, whose bound it names."""
    if not body.isascii():
        # The parsers pass over what stands in a field that they do not know, and the readers of records do not.
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise json_refusal(body, error) from None
    if body.count(b"[") + body.count(b"{") <= bounds.DEPTH and len(body) <= bounds.VALUES:
        return
    shape = measure(body)
    if shape.depth > bounds.DEPTH:
        raise ApiError(
            400, f"The body nests {shape.depth} levels deep: at most {bounds.DEPTH} are read", code="too_deep"
        )
    if shape.values > bounds.VALUES:
        raise ApiError(
            400, f"The body holds about {shape.values} values: at most {bounds.VALUES} are read", code="too_many_values"
        )


def json_refusal(text: bytes, error: Exception, noun: str = "body") -> ApiError:
    """The refusal of `text` that a parser cannot read, or that has wrong types. Of half of a surrogate pair, which JSON
    can write and no text can hold, parsers say misleading things: it is named, with its place."""
    if isinstance(error, msgspec.ValidationError):
        return bad_request(str(error))
    try:
        place = None if unwieldy(text) else _surrogate_place(json.loads(text))
    except ValueError:
        place = None
    if place is None:
        return bad_request(f"The {noun} is not valid JSON: {error}")
    message = "half of a surrogate pair is no character: send both halves, or U+FFFD instead"
    return bad_request(f"{place}: {message}".removeprefix(": "), param=place or None)


def _surrogate_place(value: Any, place: str = "") -> str | None:
    """The place of the first text that holds half of a surrogate pair; None where none does."""
    if isinstance(value, str):
        return place if _HALF.search(value) else None
    if isinstance(value, dict):
        if any(map(_HALF.search, value)):
            return place
        inner = [(f"{place}.{name[:64]}".removeprefix("."), one) for name, one in value.items()]
    else:
        inner = [(f"{place}[{at}]", one) for at, one in enumerate(value)] if isinstance(value, list) else []
    return next((where for at, one in inner if (where := _surrogate_place(one, at)) is not None), None)
