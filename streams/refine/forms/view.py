"""A text that grows by pieces of what is there, decoded, and where each byte of the additions came from.

Invariants: a piece is made from bytes before it; the bytes of a literal piece map one to one, those of a decoded one to
the whole encoded span; an addition begins with SEPARATOR, so that nothing spans two of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from millrace.streams.refine.leaves import SEPARATOR

CONTEXT = 96
"""bytes before and behind a decoded span that are read with it: rules need the name of a secret"""


class Substitution(NamedTuple):
    """Bytes [lo, hi) of a text, and what they decode to."""

    lo: int
    hi: int
    value: bytes


class _Piece(NamedTuple):
    """What begins at byte `at`: bytes [lo, hi) of what comes before it, as they are or decoded; none for SEPARATOR."""

    at: int
    lo: int
    hi: int
    literal: bool


class DecodedText:
    """A base text and its additions."""

    def __init__(self, base: bytes) -> None:
        self._base, self.size = len(base), len(base)
        self._parts = [base]
        self._pieces: list[_Piece] = []

    @property
    def text(self) -> bytes:
        """Base and additions."""
        if len(self._parts) > 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0]

    def join(self, chain: Sequence[tuple[int, int]]) -> None:
        """Add spans of the base as one text."""
        base = self._parts[0]
        self._divide()
        for lo, hi in chain:
            self._add(lo, hi, base[lo:hi], literal=True)

    def substitute(self, substitutions: Sequence[Substitution]) -> None:
        """Add windows around ascending spans that do not overlap, decoded. No two windows overlap, so that the
        addition has at most twice the bytes of what it was made from."""
        text = self.text
        at = -1
        for n, (lo, hi, value) in enumerate(substitutions):
            begin = max(0, lo - CONTEXT)
            cut = text.rfind(SEPARATOR, max(begin, at), lo)
            if cut >= 0 or at < begin:
                self._divide()
                at = begin if cut < 0 else cut + len(SEPARATOR)
            self._add(at, lo, text[at:lo], literal=True)
            self._add(lo, hi, value, literal=False)
            at = min(substitutions[n + 1].lo if n + 1 < len(substitutions) else len(text), hi + CONTEXT)
            cut = text.find(SEPARATOR, hi, at)
            at = at if cut < 0 else cut
            self._add(hi, at, text[hi:at], literal=True)

    def spans(self, start: int, end: int) -> list[tuple[int, int]]:
        """The spans [lo, hi) of the base from which bytes [start, end) were made, ascending, without overlaps."""
        out: list[tuple[int, int]] = []
        todo = [(start, end)]
        while todo:
            start, end = todo.pop()
            if start < self._base:
                out.append((start, min(end, self._base)))
            if end > self._base:
                todo += self._origins(max(start, self._base), end)
        return _union(out)

    def _origins(self, start: int, end: int) -> list[tuple[int, int]]:
        out: list[tuple[int, int]] = []
        number = max(0, bisect_right(self._pieces, start, key=itemgetter(0)) - 1)
        while number < len(self._pieces) and self._pieces[number].at < end:
            at, lo, hi, literal = self._pieces[number]
            number += 1
            if literal:
                lo, hi = max(lo, lo + start - at), min(hi, lo + end - at)
            if lo < hi:
                out.append((lo, hi))
        return _union(out)

    def _divide(self) -> None:
        self._pieces.append(_Piece(self.size, 0, 0, False))
        self._parts.append(SEPARATOR)
        self.size += len(SEPARATOR)

    def _add(self, lo: int, hi: int, value: bytes, *, literal: bool) -> None:
        if lo < hi:
            self._pieces.append(_Piece(self.size, lo, hi, literal))
            self._parts.append(value)
            self.size += len(value)


def _union(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans that touch or overlap as one."""
    out: list[tuple[int, int]] = []
    for lo, hi in sorted(spans):
        if out and lo <= out[-1][1]:
            out[-1] = (out[-1][0], max(hi, out[-1][1]))
        else:
            out.append((lo, hi))
    return out
