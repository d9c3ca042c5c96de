"""A request without what an earlier one of its trajectory said, so that a conversation is stored once and not again
with each of its calls.

Agents send the whole conversation with each call. What a call's request repeats of an earlier one (`request_base`) is
left out of the record: leading items of the lists at its top level (messages, input, tools), and whole values there
(instructions, a schema). What stays is JSON of the same form, so it is looked through, shown and asked for like any
other; `request_kept` says what was left out of it.

Invariants: `rebuild` gives back the very bytes that were shortened, or nothing; what is left out is compared by digests
of its bytes, never by what it means; only the structure says where it stood, so that texts may be taken out of both
requests meanwhile; no bytes whatsoever raise. Pure."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import orjson

from millrace.schemas.records import ModelCall

WHOLE = -1
"""in `request_kept`: the whole value, which reads null"""
LEAST = 512
"""bytes that have to be left out, for a request to be worth being put together again"""
LONG = 256
"""bytes of a value from which on it may be left out whole: names stay, by which people ask"""
MOST_ITEMS = 1 << 14
"""items, members and brackets at the top of a request, beyond which nothing of it is left out"""
MOST_KEYS, KEY_BYTES = 64, 256
"""keys of which something is left out, and bytes of one: what is kept has to be within the bounds of a record"""
LARGEST = 64 << 20
"""bytes of a request that is put together again"""
AT_HAND = 8
"""whole requests that a store keeps beside what was stored"""
MANY = 16 << 10
"""bytes of a text from which on counting all marks at once is quicker than one after the other"""
SIZE = 16
QUOTE, OPEN, CLOSE, COMMA = 1, 2, 3, 4
_MARKS = bytes({34: QUOTE, 91: OPEN, 123: OPEN, 93: CLOSE, 125: CLOSE, 44: COMMA}.get(n, 0) for n in range(256))
_STEPS = np.array([0, 0, 1, -1, 0], np.int32)
_KEY = re.compile(rb'\s*("[^"\\]*(?:\\.[^"\\]*)*")\s*:\s*', re.DOTALL)
_MARK = re.compile(rb"[\[\]{},]")
_SPACE = b" \t\r\n"
Marks = tuple[list[int], list[int], list[int]]
"""brackets and commas outside of strings, at most two deep: where they stand, which they are, how deep"""

Digests = dict[str, bytes | tuple[bytes, ...]]
"""of each long value at the top of a request, by its key; of a list those of its items, in order"""


class Value(NamedTuple):
    """A value at bytes [lo, hi) of a request; of a list `ends`, where each of its items ends."""

    lo: int
    hi: int
    ends: tuple[int, ...] | None

    @property
    def starts(self) -> int:
        """Where the items of a list begin."""
        return self.lo + 1


def outline(body: bytes) -> dict[str, Value] | None:
    """Where the values at the top of a JSON object stand, by their keys; without keys that come twice. None for what is
    none, or has too many of them."""
    if body[:1] != b"{" and body.lstrip(_SPACE)[:1] != b"{":
        return None
    text = body
    if b"\\" in body:
        # Same length, and bytes that mean nothing here: what is left of quotes begins or ends a string.
        text = body.replace(b"\\\\", b"\1\1").replace(b'\\"', b"\1\1")
    marks = _few_marks(text) if len(text) < MANY else _many_marks(text)
    return None if marks is None or len(marks[0]) > MOST_ITEMS else _values(body, *marks)


def _few_marks(text: bytes) -> Marks:
    """What stands outside of strings at the top of a text, one mark after the other."""
    at, kinds, level = list[int](), list[int](), list[int]()
    deep = start = 0
    for number, part in enumerate(text.split(b'"')):
        if number % 2 == 0 and part:  # between two strings
            for match in _MARK.finditer(part):
                mark = _MARKS[part[match.start()]]
                deep += mark == OPEN
                if deep <= 2:
                    at.append(start + match.start())
                    kinds.append(mark)
                    level.append(deep)
                deep -= mark == CLOSE
        start += len(part) + 1
    return at, kinds, level


def _many_marks(text: bytes) -> Marks | None:
    """The same, all at once, for a long text; None where there are more than `MOST_ITEMS`."""
    marks = np.frombuffer(text.translate(_MARKS), np.uint8)
    at = np.flatnonzero(marks)
    kinds = marks[at]
    quotes = kinds == QUOTE
    outside = ~quotes & ((np.cumsum(quotes, dtype=np.int32) & 1) == 0)
    at, kinds = at[outside], kinds[outside]
    depth = np.cumsum(_STEPS[kinds], dtype=np.int32)
    level = depth + (kinds == CLOSE)
    top = level <= 2
    if int(top.sum()) > MOST_ITEMS:
        return None
    return at[top].tolist(), kinds[top].tolist(), level[top].tolist()


def _values(body: bytes, at: list[int], kinds: list[int], level: list[int]) -> dict[str, Value]:
    """The values of an object, by its marks: where they stand, which they are, and how deep."""
    values: dict[str, Value] = {}
    twice: set[str] = set()
    ends: list[int] = []
    lists, begins = 0, at[0] + 1 if at else 0
    for place, mark, deep in zip(at, kinds, level, strict=True):
        if deep == 2:
            if mark == OPEN:
                lists, ends = place, []
            else:
                ends.append(place)
        elif mark in (COMMA, CLOSE) and deep == 1:
            match = _KEY.match(body, begins, place)
            if match is not None:
                key, lo = _text(match[1]), match.end()
                hi = lo + len(body[lo:place].rstrip(_SPACE))
                items = tuple(ends) if body[lo : lo + 1] == b"[" and lists == lo and ends[-1:] == [hi - 1] else None
                if items is not None and len(items) == 1 and not body[lo + 1 : hi - 1].strip(_SPACE):
                    items = ()
                if key in values or key is None:
                    twice.add(key or "")
                else:
                    values[key] = Value(lo, hi, items)
            begins = place + 1
    return {key: value for key, value in values.items() if key not in twice}


def _text(literal: bytes) -> str | None:
    try:
        text: str = orjson.loads(literal)
    except orjson.JSONDecodeError:
        return None
    return text


class RequestOutline(NamedTuple):
    """A request as it is compared. `values` say where its parts stand in `body`."""

    body: bytes
    values: dict[str, Value]
    digests: Digests


def outline_request(body: bytes) -> RequestOutline | None:
    """The outline of a request; None for one that is stored whole, and that nothing is left out for."""
    values = outline(body) if len(body) >= LEAST else None
    if values is None:
        return None
    digests: Digests = {}
    for key, value in values.items():
        if len(digests) == MOST_KEYS or len(key.encode()) > KEY_BYTES:
            continue
        if value.ends is None:
            if value.hi - value.lo >= LONG:
                digests[key] = _digest(body[value.lo : value.hi])
        else:
            pieces = zip((value.starts, *value.ends), value.ends, strict=False)
            digests[key] = tuple(_digest(body[lo:hi]) for lo, hi in pieces)
    return RequestOutline(body, values, digests)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=SIZE).digest()


def in_common(outline: RequestOutline, base: Digests) -> tuple[dict[str, int], int]:
    """What a request repeats of a known one, as `request_kept` says it, and how many bytes that saves."""
    counts: dict[str, int] = {}
    savings = 0
    for key, digests in outline.digests.items():
        base_digests, value = base.get(key), outline.values[key]
        if isinstance(digests, bytes):
            if digests == base_digests:
                counts[key], savings = WHOLE, savings + value.hi - value.lo
        elif isinstance(base_digests, tuple) and value.ends is not None:
            count = _prefix(digests, base_digests)
            if count:
                counts[key], savings = count, savings + value.ends[count - 1] - value.lo
    return counts, savings


def _prefix(items: tuple[bytes, ...], base_items: tuple[bytes, ...]) -> int:
    most = min(len(items), len(base_items))
    if items[:most] == base_items[:most]:
        return most
    return next(n for n in range(most) if items[n] != base_items[n])


def shorten(outline: RequestOutline, counts: Mapping[str, int]) -> bytes | None:
    """The request without what is kept of another one; None where that could not be undone."""
    body, parts, at = outline.body, list[bytes](), 0
    for value, count in sorted((outline.values[key], count) for key, count in counts.items()):
        if count == WHOLE:
            parts += [body[at : value.lo], b"null"]
            at = value.hi
        elif value.ends is not None:
            parts.append(body[at : value.starts])
            at = value.ends[count - 1] + (count < len(value.ends))  # with the comma, where an item follows
    request = b"".join([*parts, body[at:]])
    return request if _splice(request, counts, body, outline.values) == body else None


def rebuild(request: bytes, counts: Mapping[str, int], base: bytes) -> bytes | None:
    """The whole request, from what was stored of it and the whole request of its base; None where they do not fit."""
    values = outline(base)
    return None if values is None else _splice(request, counts, base, values)


def _splice(request: bytes, counts: Mapping[str, int], base: bytes, base_values: Mapping[str, Value]) -> bytes | None:
    values = outline(request)
    if values is None:
        return None
    inserts: list[tuple[int, int, bytes]] = []
    for key, count in counts.items():
        value, source = values.get(key), base_values.get(key)
        if value is None or source is None:
            return None
        if count == WHOLE:
            if request[value.lo : value.hi] != b"null":
                return None
            inserts.append((value.lo, value.hi, base[source.lo : source.hi]))
        elif value.ends is None or source.ends is None or not 0 < count <= len(source.ends):
            return None
        else:
            items = base[source.starts : source.ends[count - 1]]
            inserts.append((value.starts, value.starts, items + b"," if value.ends else items))
    parts, at = list[bytes](), 0
    for lo, hi, piece in sorted(inserts):
        parts += [request[at:lo], piece]
        at = hi
    return b"".join([*parts, request[at:]])


class RequestStore:
    """The whole requests of one trajectory's calls. They are kept as they were stored, so that memory grows like the
    log, and put together when they are asked for; the newest stay at hand."""

    def __init__(self) -> None:
        self._stored: dict[str, tuple[bytes, str | None, Mapping[str, int]]] = {}
        self._whole: OrderedDict[str, bytes] = OrderedDict()

    def add(self, event: str, call: ModelCall) -> bytes | None:
        """Take the ModelCall of an event; returns its whole request, None where the log does not say it."""
        self._stored.setdefault(event, (call["request"], call["request_base"], call["request_kept"]))
        return self.full_request(event)

    def full_request(self, event: str) -> bytes | None:
        """The whole request of a call that was added, None where it is not known."""
        behind: list[str] = []
        at: str | None = event
        while at is not None and at not in self._whole:
            if at not in self._stored or len(behind) > len(self._stored):
                return None
            behind.append(at)
            at = self._stored[at][1]
        full_request = None if at is None else self._whole[at]
        while behind:
            name = behind.pop()
            request, base, counts = self._stored[name]
            if base is not None:
                full_request = None if full_request is None else rebuild(request, counts, full_request)
                if full_request is None or len(full_request) > LARGEST:
                    return None
            else:
                full_request = request
            self._whole[name] = full_request
            if len(self._whole) > AT_HAND:
                self._whole.popitem(last=False)
        return full_request
