"""JSON text as a flat row of tokens, found in one pass: its strings, keys and long numbers, and where they stand.

The text itself is never parsed into objects and written again: what is taken out is cut out of the stored bytes, so
duplicate keys, the order of keys and the spelling of numbers stay, and nothing can hide behind a second key of the same
name. There is no recursion: nesting costs a counter.

Invariants: tokens come in the order of the text and do not overlap; a token's value is what a JSON parser would
read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import orjson

from millrace.schemas import bounds

KEY, STRING, NUMBER = "key", "string", "number"

_NUMBER = re.compile(rb"(?<![\d.+])-?+(\d{12,}+)(?![\d.eE])")
"""Twelve digits may be an account or a card; floats are measures and never scanned."""
_MARKS = re.compile(rb"[\[\]{},]|(?<![\d.+])-?+\d{12,}+(?![\d.eE])")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""brackets as the signed bytes 1 and -1"""
_QUOTE = 2
_STEPS_AND_QUOTES = bytes(_QUOTE if n == 34 else 1 if n in b"[{" else 255 if n in b"]}" else 0 for n in range(256))
_SPACE = b" \t\r\n"
_PLAIN_KEY = re.compile(rb"[A-Za-z_][A-Za-z_-]{0,40}")


class Token(NamedTuple):
    """A string, key or number at bytes [lo, hi) of the text, quotes included."""

    kind: str
    lo: int
    hi: int
    value: bytes
    """UTF-8 of what it means, escapes undone"""
    beside: bool
    """whether it is the value of the key before it"""


class TooDeep(Exception):
    """The text nests deeper than `bounds.DEPTH`."""


class Document:
    """A JSON list or map."""

    def __init__(self, data: bytes) -> None:
        """`data` must be valid JSON. Raises TooDeep."""
        self.data = data
        text = data
        if b"\\" in data:
            # Same length, and a byte that no JSON string holds: what is left of quotes begins or ends a string.
            text = data.replace(b"\\\\", b"\1\1").replace(b'\\"', b"\1\1")
        self._parts = text.split(b'"')
        if self._is_deep():
            raise TooDeep

    def _is_deep(self) -> bool:
        brackets = b"".join(self._parts[::2]).translate(_STEPS, _NO_BRACKETS)
        if len(brackets) <= bounds.DEPTH:
            return False
        return int(np.frombuffer(brackets, np.int8).cumsum(dtype=np.int32).max(initial=0)) > bounds.DEPTH

    def tokens(self) -> Iterator[Token]:
        """Every string, key and long number."""
        parts, at, is_key = self._parts, 0, False
        for n in range(0, len(parts), 2):
            gap = parts[n]
            if len(gap) >= 12:
                for match in _NUMBER.finditer(gap):
                    beside = is_key and not gap[: match.start()].lstrip(b" \t\r\n:")
                    yield Token(NUMBER, at + match.start(), at + match.end(), match[1], beside)
            at += len(gap)
            if n + 1 == len(parts):
                return
            inner, after = len(parts[n + 1]), parts[n + 2]
            beside = is_key and gap.strip() == b":"
            is_key = after[:1] == b":" or after.lstrip()[:1] == b":"
            yield Token(KEY if is_key else STRING, at, at + inner + 2, self._value(at + 1, inner), beside)
            at += inner + 2

    def values(self) -> list[bytes]:
        """What each string, key and long number means, once."""
        gaps, strings = self._parts[::2], self._parts[1::2]
        if b"\\" in self.data or any(len(gap) >= 12 and _NUMBER.search(gap) for gap in gaps):
            return list(dict.fromkeys(token.value for token in self.tokens()))
        return list(dict.fromkeys(strings))

    def values_of(self, keys: frozenset[bytes]) -> list[tuple[int, int]]:
        """Where the outermost lists and maps under keys of these names stand, as [lo, hi) of the text."""
        spans: list[tuple[int, int]] = []
        brackets = _Brackets(self._parts)
        parts, at, beyond = self._parts, 0, 0
        for n in range(0, len(parts) - 2, 2):
            at += len(parts[n])
            inner, after = len(parts[n + 1]), parts[n + 2]
            end = at + inner + 2
            rest = after.lstrip(_SPACE)
            if at >= beyond and rest[:1] == b":" and self._value(at + 1, inner) in keys:
                value = rest[1:].lstrip(_SPACE)
                if value[:1] in (b"[", b"{"):
                    start = end + len(after) - len(value)
                    beyond = brackets.end_of(start)
                    spans.append((start, beyond))
            at = end
        return spans

    def paths(self, root: str, starts: frozenset[int], secret_keys: frozenset[int]) -> dict[int, str]:
        """Where the tokens that begin at `starts` stand: `root/key/0/key`. A key is named when it is a plain word and
        does not begin at `secret_keys`; else its number stands for it, and `#number` for the key itself."""
        out: dict[int, str] = {}
        around: list[tuple[str, int, str]] = []
        path, number, name = root, 0, ""
        for lo, hi, mark in self._shape():
            if mark in ("[", "{"):
                around.append((path, number, name))
                if len(around) > 1:
                    path = f"{path}/{name or number}"
                number, name = 0, ""
            elif mark in ("]", "}"):
                path, number, name = around.pop()
            elif mark == ",":
                number, name = number + 1, ""
            elif mark == KEY:
                value = self._value(lo + 1, hi - lo - 2)
                is_plain = lo not in secret_keys and _PLAIN_KEY.fullmatch(value) is not None
                name = value.decode() if is_plain else str(number)
                if lo in starts:
                    out[lo] = f"{path}/#{number}"
            elif lo in starts:
                out[lo] = f"{path}/{name or number}"
        return out

    def _shape(self) -> Iterator[tuple[int, int, str]]:
        """(lo, hi, what) of brackets, commas, keys, strings and long numbers."""
        parts, at = self._parts, 0
        for n in range(0, len(parts), 2):
            gap = parts[n]
            for match in _MARKS.finditer(gap):
                mark = match[0].decode() if match.end() - match.start() == 1 else NUMBER
                yield at + match.start(), at + match.end(), mark
            at += len(gap)
            if n + 1 == len(parts):
                return
            end = at + len(parts[n + 1]) + 2
            yield at, end, KEY if parts[n + 2].lstrip()[:1] == b":" else STRING
            at = end

    def _value(self, at: int, size: int) -> bytes:
        inner = self.data[at : at + size]
        if b"\\" not in inner:
            return inner
        text: str = orjson.loads(b'"%b"' % inner)
        return text.encode()


class _Brackets:
    """The brackets of a text outside its strings. `parts` is the text between its quotes."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        text = np.frombuffer(b'"'.join(parts).translate(_STEPS_AND_QUOTES), np.int8)
        # Odd behind a quote that begins a string, even behind one that ends it; a sum that runs over stays odd or even.
        inside = (text == _QUOTE).cumsum(dtype=np.uint8) & 1
        self._at = np.flatnonzero((np.abs(text) == 1) & (inside == 0))
        self._depth = text[self._at].cumsum(dtype=np.int32)

    def end_of(self, start: int) -> int:
        """Where the list or map that begins at a place ends. Its cost is that of what lies between."""
        first = int(np.searchsorted(self._at, start))
        outside = self._depth[first] - 1
        size = 16
        while True:
            ends = np.flatnonzero(self._depth[first : first + size] == outside)
            if len(ends):
                return int(self._at[first + int(ends[0])]) + 1
            size *= 2


def document(data: bytes) -> Document | None:
    """The list or map that a text is, None for any other. Raises TooDeep for one that nobody should walk through."""
    if data[:1] not in (b"{", b"["):
        return None
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if "depth limit" in error.msg:
            raise TooDeep from None
        return None
    return Document(data)
