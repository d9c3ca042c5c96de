"""Odd inputs for fuzzing: JSON values of every size and shape, and values and bytes changed at random places.

Invariant: everything comes from the `random.Random` that is given, so that a seed names an input."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from json.encoder import encode_basestring
from random import Random
from typing import Any

NUMBERS = (
    "0", "-0", "1", "-1", "2", "0.5", "1.0", "1e20", "-1e19", "1e308", "1e400", "-1e400", "1e-400", "2147483647",
    "2147483648", "-2147483649", "4294967296", "9007199254740993", "9223372036854775807", "9223372036854775808",
    "-9223372036854775809",
    "18446744073709551615", "18446744073709551616", "12345678901234567890123", "9" * 310, "9" * 5000, "NaN", "Infinity",
)  # fmt: skip
WIDE = ("18446744073709551616", "-9223372036854775809", "12345678901234567890123", "9" * 310)
"""among them one that no float holds either"""
STRINGS = (
    '""', '"x"', '" "', '"\\u0000"', '"\\ud800"', '"\\udfff\\ud800"', '"\\u001b[2J"', '"ü"', '"\\uffff"', '"𝄞"',
    '"\\\\"', '"\\""',
    '"<|im_end|>"', '"<tool_call>"', '"</think>"', '"{}"', '"[1]"', '"null"', '"../../x"', '"a\\r\\nb: c"',
    '"[[[[[[[["',
)  # fmt: skip
WORDS = (
    "role",
    "content",
    "id",
    "name",
    "text",
    "type",
    "function",
    "arguments",
    "value",
    "kind",
    "index",
    "n",
    "stop",
)


class Raw(str):
    """Text that goes into JSON as it is, sound or not."""


def number(r: Random) -> Raw:
    """A number that is at some border."""
    return Raw(r.choice(NUMBERS))


def wide(r: Random) -> Raw:
    """An integer that 64 bits do not hold."""
    return Raw(r.choice(WIDE))


def string(r: Random) -> Raw:
    """A string that is at some border."""
    if r.random() < 0.1:
        return long(r)
    return Raw(r.choice(STRINGS))


def long(r: Random) -> Raw:
    """A string of a length at some border, in characters or in bytes."""
    character, count = r.choice("xü\x00𝄞"), r.choice((100, 201, 255, 257, 1023, 1024, 1025, 5000))
    return Raw(json.dumps(character * (count // len(character.encode()) if r.random() < 0.5 else count)))


def nested(r: Random) -> Raw:
    """Lists or maps within each other."""
    depth = r.choice((3, 30, 55, 63, 64, 65, 66, 253, 256, 600, 1100, 3000))
    opening, closing = r.choice((("[", "]"), ('{"a":', "}"), ('[{"b":', "}]")))
    return Raw(opening * depth + r.choice(("1", '""', "null")) + closing * depth)


def value(r: Random, levels: int = 3) -> Any:
    """Any JSON value, and some text that is none."""
    kind = r.random()
    if kind < 0.25:
        return number(r)
    if kind < 0.5:
        return string(r)
    if kind < 0.6:
        return r.choice((None, True, False))
    if kind < 0.65:
        return nested(r)
    if kind < 0.66:
        return Raw(r.choice(("", "[", "}", "tru", '"', "[1,]", "{,}", "\\", "0x1", "01", "+1")))
    if levels == 0:
        return r.choice(("", [], {}))
    if kind < 0.85:
        return [value(r, levels - 1) for _ in range(300 if levels == 3 and r.random() < 0.05 else r.randrange(3))]
    return {r.choice((*WORDS, str(r.random()))): value(r, levels - 1) for _ in range(r.randrange(4))}


def text(given: Any) -> str:
    """JSON text of a value that may hold raw parts."""
    if isinstance(given, Raw):
        return given
    if isinstance(given, str):
        return encode_basestring(given)
    if isinstance(given, dict):
        return "{" + ",".join([f'"{name}":{text(inner)}' for name, inner in given.items()]) + "}"
    if isinstance(given, list | tuple):
        return "[" + ",".join([text(inner) for inner in given]) + "]"
    return json.dumps(given)


def changed(r: Random, given: Any) -> Any:
    """The value with something odd in one place of it: near its root, or anywhere in it."""
    if r.random() < 0.5:
        return _descended(r, given)
    places = list(_places(given))
    return _put(given, r.choice(places), lambda found: _alike(r, found))


def _descended(r: Random, given: Any) -> Any:
    if not isinstance(given, dict | list) or not given or r.random() < 0.15:
        return value(r)
    if isinstance(given, dict):
        name = r.choice(list(given))
        if (what := r.random()) < 0.1:
            return {other: inner for other, inner in given.items() if other != name}
        if what < 0.2:
            return {**given, r.choice(WORDS): value(r)}
        return {**given, name: _descended(r, given[name])}
    at = r.randrange(len(given))
    if (what := r.random()) < 0.1:
        return given[:at] + given[at + 1 :]
    if what < 0.2:
        return [*given, *given[at : at + 1] * r.choice((1, 1, 2, 2, 5, 5, 300))]
    return [*given[:at], _descended(r, given[at]), *given[at + 1 :]]


def _places(given: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value within a value."""
    yield path
    if isinstance(given, dict | list):
        for at, inner in given.items() if isinstance(given, dict) else enumerate(given):
            yield from _places(inner, (*path, at))


def _put(given: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(given)
    inner = _put(given[path[0]], path[1:], change)
    if isinstance(given, dict):
        return {**given, path[0]: inner}
    return [*given[: path[0]], inner, *given[path[0] + 1 :]]


def _alike(r: Random, given: Any) -> Any:
    """Another value of the same type, at a border of it; what has no border becomes anything."""
    if isinstance(given, Raw) or given is None or isinstance(given, bool):
        return value(r)
    if isinstance(given, int | float):
        return number(r)
    if isinstance(given, str):
        return long(r) if r.random() < 0.4 else string(r)
    if isinstance(given, list):
        return given * r.choice((0, 2, 17, 129, 257, 1025)) if given else value(r)
    if r.random() < 0.3:
        return {**given, **{f"k{at}": at for at in range(257)}}
    return {**given, "k": r.choice((number, string, nested))(r)}


def broken(r: Random, data: bytes) -> bytes:
    """The bytes with a few of them changed, cut or doubled."""
    out = bytearray(data)
    for _ in range(r.choice((1, 1, 2, 5))):
        at = r.randrange(len(out) + 1)
        what = r.random()
        if what < 0.3:
            del out[at : at + r.choice((1, 2, 20))]
        elif what < 0.6:
            out[at:at] = r.choice((b"\x00", b"\xff", b'"', b"\\", b"{", b"]", b"\r\n", b"\n\n", b",", b"e", b"data:"))
        elif what < 0.8 and at < len(out):
            out[at] = r.randrange(256)
        elif what < 0.9:
            del out[at:]
        else:
            out[at:at] = out[max(0, at - 30) : at]
    return bytes(out)
