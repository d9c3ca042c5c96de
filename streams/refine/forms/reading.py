"""Detectors over a text and over all that it decodes to, in one scan.

    buffer | strings that go on in the next one, joined | both, decoded | that, decoded again

Invariants: a hit in what was decoded becomes hits on the spans of the buffer that it was made of; what the buffer shows
by itself counts once; only strings of one message are joined, in their order; no run is decoded more than ROUNDS times,
so that what detectors are handed is bounded by a multiple of the buffer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from operator import itemgetter

from millrace.streams.refine.detectors.base import Hit
from millrace.streams.refine.forms.decode import substitutions
from millrace.streams.refine.forms.view import DecodedText, Substitution
from millrace.streams.refine.leaves import Buffer, LeafKind

ROUNDS = 2
"""levels of encoding inside each other"""
VERSION = "forms-1"
"""changes with what is decoded and how"""
REACH = 256
"""bytes of a string at the end where another one goes on"""
NEIGHBOURS = 512
"""leaves of an event whose strings are joined whatever their keys are called: traffic has thousands of short ones"""
MESSAGE_KEYS = frozenset({b"role", b"call_id", b"tool_call_id"})
"""keys of a message of its own: what a request leaves out must not change how the rest is read"""
SHORTEST = 16
"""bytes of what several strings spell"""
_WORD = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_+/=~-"
_LETTERS = frozenset(_WORD)
_DIGITS = b"0123456789"

Chain = list[tuple[int, int]]


class Reading:
    """A buffer with its decoded forms: `text` is what detectors read."""

    def __init__(self, buffer: Buffer) -> None:
        view = DecodedText(buffer.text)
        self._base = view.size
        for chain in chains(buffer):
            view.join(chain)
        self._joined = view.size
        start = 0
        for _ in range(ROUNDS):
            end, text = view.size, view.text
            section = text[start:] if start else text
            candidates = substitutions(section)
            if not candidates:
                break
            view.substitute([Substitution(lo + start, hi + start, value) for lo, hi, value in candidates])
            start = end
        self._view = view
        self.text = view.text

    def hits(self, hits: Iterable[Hit]) -> list[Hit]:
        """Hits of `text` as hits of the buffer, in order of start."""
        out: list[Hit] = []
        more: list[Hit] = []
        for hit in hits:
            (out if hit.start < self._base else more).append(hit)
        if more:
            out.sort()
            covers = _covers(out)
            decoded = {part for hit in more for part in self._parts(hit, out)}
            out += (hit for hit in decoded if not covers(hit))
        return sorted(out)

    def _parts(self, hit: Hit, plain: Sequence[Hit]) -> list[Hit]:
        spans = self._view.spans(hit.start, hit.end)
        # A string that holds all of it did not need the next one.
        if hit.start < self._joined and (len(spans) < 2 or not hit.blocks or _holds_one(spans, hit.kind, plain)):
            return []
        return [Hit(lo, hi, hit.kind, f"{hit.detector}:decoded", hit.blocks) for lo, hi in spans]


def _holds_one(spans: Iterable[tuple[int, int]], kind: str, hits: Sequence[Hit]) -> bool:
    """Whether one of the spans has a hit of a kind. `hits` ascend."""
    for lo, hi in spans:
        number = bisect_left(hits, lo, key=itemgetter(0))
        while number < len(hits) and hits[number].start < hi:
            if hits[number].kind == kind:
                return True
            number += 1
    return False


def _covers(hits: Iterable[Hit]) -> Callable[[Hit], bool]:
    """Whether a hit lies in one of these of its kind that says as much."""
    spans: dict[tuple[str, bool], list[tuple[int, int]]] = {}
    for hit in hits:
        spans.setdefault((hit.kind, hit.blocks), []).append((hit.start, hit.end))
    ends: dict[tuple[str, bool], tuple[list[int], list[int]]] = {}
    for key, places in spans.items():
        places.sort()
        ends[key] = [start for start, _ in places], list(accumulate((end for _, end in places), max))

    def covers(hit: Hit) -> bool:
        for blocks in {True, hit.blocks}:
            starts, furthest = ends.get((hit.kind, blocks), ((), ()))
            number = bisect_right(starts, hit.start) - 1
            if number >= 0 and furthest[number] >= hit.end:
                return True
        return False

    return covers


def chains(buffer: Buffer) -> list[Chain]:
    """The spans of the buffer that belong together, two or more at a time."""
    text = buffer.text
    out: list[Chain] = []
    tracks: dict[bytes | None, Chain] = {}
    source, key_end, name = -1, -1, b""
    key_kind, string_kind, letters = LeafKind.KEY, LeafKind.STRING, _LETTERS
    has_neighbours = len(buffer.leaves) <= NEIGHBOURS
    for leaf in buffer.leaves:
        kind, start, end, origin, _, _ = leaf
        if kind is key_kind:
            name, key_end = text[start:end].rstrip(_DIGITS), end
            if name in MESSAGE_KEYS:
                source = -1
        elif kind is string_kind and start < end:
            if origin != source:
                out += tracks.values()
                tracks, source = {}, origin
            goes_on, comes = text[end - 1] in letters, text[start] in letters
            key = name if key_end + 3 == start else b""
            for track in (None, key) if has_neighbours else (key,):
                chain = tracks.get(track)
                if chain is not None and comes:
                    head = text[start : min(end, start + REACH)]
                    beyond = start + len(head) - len(head.lstrip(_WORD))
                    chain.append((start, beyond))
                    if beyond == end:
                        continue
                if chain is not None:
                    if len(chain) > 1:
                        out.append(chain)
                    del tracks[track]
                if goes_on:
                    tail = text[max(start, end - REACH) : end]
                    tracks[track] = [(end - len(tail) + len(tail.rstrip(_WORD)), end)]
    out += tracks.values()
    return [chain for chain in out if _is_value(text, chain)]


def _is_value(text: bytes, chain: Chain) -> bool:
    if len(chain) < 2 or sum(hi - lo for lo, hi in chain) < SHORTEST:
        return False
    value = b"".join(text[lo:hi] for lo, hi in chain)
    return 0 < len(value.translate(None, _DIGITS)) < len(value)
