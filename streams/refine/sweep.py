"""Hits of detectors on one side, leaves of a buffer on the other: what to cut out of which leaf.

Both are sorted, so one pass over each is enough: time is linear in their number, however they overlap."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from millrace.streams.refine.detectors.base import Hit
from millrace.streams.refine.leaves import Leaf, LeafKind


class FoundSpan(NamedTuple):
    """Bytes [start, end), and what was found there."""

    start: int
    end: int
    kind: str


def cuts(hits: Iterable[Hit], leaves: Sequence[Leaf]) -> dict[int, list[FoundSpan]]:
    """Leaf number -> spans of the leaf to take out, ascending.

    A hit that begins in a key and reaches into its value is about the value: the key stays."""
    starts = [leaf.start for leaf in leaves]
    in_keys: list[FoundSpan] = []
    in_values: list[FoundSpan] = []
    for hit in hits:
        first = _first(starts, leaves, hit.start)
        if first == len(leaves):
            continue
        beyond = starts[first + 1] if first + 1 < len(leaves) else hit.end
        alone = leaves[first].kind is LeafKind.KEY and hit.end <= beyond
        (in_keys if alone else in_values).append(FoundSpan(hit.start, hit.end, hit.kind))
    cuts_by_leaf: dict[int, list[FoundSpan]] = {}
    for span in _merge(in_keys):
        _cut(cuts_by_leaf, span, _first(starts, leaves, span.start), leaves)
    for span in _merge(in_values):
        numbers = list(_leaf_numbers(starts, leaves, span.start, span.end))
        values = [number for number in numbers if leaves[number].kind is not LeafKind.KEY]
        for number in values or numbers:
            _cut(cuts_by_leaf, span, number, leaves)
    return {number: sorted(spans) for number, spans in cuts_by_leaf.items()}


def places(hit: Hit, starts: Sequence[int], leaves: Sequence[Leaf]) -> Iterator[tuple[int, int, int]]:
    """(leaf number, start, end) of the parts of a hit that lie in leaves, as offsets of the leaf; keys that name a
    value that the hit reaches are left out."""
    numbers = list(_leaf_numbers(starts, leaves, hit.start, hit.end))
    values = [number for number in numbers if leaves[number].kind is not LeafKind.KEY]
    for number in values or numbers:
        leaf = leaves[number]
        yield number, max(hit.start, leaf.start) - leaf.start, min(hit.end, leaf.end) - leaf.start


def _first(starts: Sequence[int], leaves: Sequence[Leaf], at: int) -> int:
    """The leaf that holds a byte of the buffer, or the first one behind it."""
    number = bisect_right(starts, at) - 1
    return number if number >= 0 and at < leaves[number].end else number + 1


def _leaf_numbers(starts: Sequence[int], leaves: Sequence[Leaf], start: int, end: int) -> Iterator[int]:
    number = _first(starts, leaves, start)
    while number < len(leaves) and starts[number] < end:
        yield number
        number += 1


def _cut(cuts_by_leaf: dict[int, list[FoundSpan]], span: FoundSpan, number: int, leaves: Sequence[Leaf]) -> None:
    leaf = leaves[number]
    start, end = max(span.start, leaf.start) - leaf.start, min(span.end, leaf.end) - leaf.start
    if start < end:
        cuts_by_leaf.setdefault(number, []).append(FoundSpan(start, end, span.kind))


def _merge(spans: Iterable[FoundSpan]) -> list[FoundSpan]:
    """Overlapping spans as one, which is called as the first of them."""
    out: list[FoundSpan] = []
    for span in sorted(spans):
        if out and span.start < out[-1].end:
            out[-1] = out[-1]._replace(end=max(out[-1].end, span.end))
        else:
            out.append(span)
    return out
