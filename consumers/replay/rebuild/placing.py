"""Offsets of one partition's records of which some are known.

Invariants: a known offset is kept; offsets are distinct, and rise within what one slot wrote wherever holes allow it.
What is not known is put where the log would have put it: behind what its slot wrote before, records of one turn side
by side, and one offset between two turns for the end of a transaction. What a reader's turns say of the first and the
last record that they took is believed where it fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

BEHIND = 1 << 62


class UnplacedRecord(NamedTuple):
    """A record to place. lane: the stage's slot that wrote it; turn: its number; at: micros of that turn."""

    lane: str
    turn: int
    at: int
    offset: int | None


class TurnSpan(NamedTuple):
    """What one turn of a reader took of the partition: its first and last offset, and how many records."""

    first: int
    last: int
    records: int


def place_records(slots: Sequence[UnplacedRecord], read: Sequence[TurnSpan] = ()) -> list[int]:
    """The offset of each record; records of one lane are given in their order. read: in order, from the first record
    of the partition on."""
    order = _order(slots)
    anchors = [slots[n].offset for n in order]
    out = _fill([slots[n] for n in order], _add_spans(anchors, read))
    offsets = [0] * len(slots)
    for n, offset in zip(order, out, strict=True):
        offsets[n] = offset
    return offsets


def _order(slots: Sequence[UnplacedRecord]) -> list[int]:
    """Their order: known ones by offset; each other one behind the last that was written before it, as far as its own
    slot's order allows."""
    anchors = sorted((slot.offset, slot.at) for slot in slots if slot.offset is not None)
    offsets = [offset for offset, _ in anchors]
    latest = list(accumulate((at for _, at in anchors), max))
    nexts: dict[str, int] = {}
    following = [BEHIND] * len(slots)
    for n in reversed(range(len(slots))):
        offset, lane = slots[n].offset, slots[n].lane
        if offset is not None:
            nexts[lane] = offset
        following[n] = nexts.get(lane, BEHIND)
    keys = list[tuple[int, int, int, str, int, int]]()
    last: dict[str, int] = {}
    for n, (lane, turn, at, offset) in enumerate(slots):
        if offset is not None:
            last[lane] = offset
            keys.append((offset, 0, 0, "", 0, n))
            continue
        before = bisect_left(latest, at)
        anchor = max(last.get(lane, -1), min(offsets[before - 1] if before else -1, following[n] - 1))
        keys.append((anchor, 1, at, lane, turn, n))
    return [key[-1] for key in sorted(keys)]


def _add_spans(anchors: Sequence[int | None], read: Sequence[TurnSpan]) -> Sequence[int | None]:
    """The known offsets with those that readers tell, if they fit together."""
    out, at = list(anchors), 0
    for span in read:
        if at + span.records > len(out) or not span.records:
            break
        for n, offset in ((at, span.first), (at + span.records - 1, span.last)):
            if out[n] not in (None, offset):
                return anchors
            out[n] = offset
        at += span.records
    pairs = [(n, offset) for n, offset in enumerate(out) if offset is not None]
    fits = all(b - a >= there - here for (here, a), (there, b) in pairwise(pairs))
    return out if fits and (not pairs or pairs[0][1] >= pairs[0][0]) else anchors


def _fill(slots: Sequence[UnplacedRecord], anchors: Sequence[int | None]) -> list[int]:
    """Every offset, in the order given."""
    limits, limit = [BEHIND] * len(slots), BEHIND
    for n in reversed(range(len(slots))):
        here = anchors[n]
        limits[n] = limit = limit - 1 if here is None else here
    out, homeless, last = [-1] * len(slots), list[int](), -1
    for n, slot in enumerate(slots):
        here = anchors[n]
        if here is None:
            marker = n > 0 and (slot.lane, slot.turn) != (slots[n - 1].lane, slots[n - 1].turn)
            here = max(last + 1, min(last + 1 + marker, limits[n]))
            if here > limits[n]:
                homeless.append(n)
                continue
        out[n] = last = here
    numbers = set(out)
    for n in homeless:  # no hole where it belongs
        here = limits[n] + 1
        while here in numbers:
            here += 1
        out[n] = here
        numbers.add(here)
    return out
