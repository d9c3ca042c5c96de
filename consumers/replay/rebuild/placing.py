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


def placed(slots: Sequence[UnplacedRecord], read: Sequence[TurnSpan] = ()) -> list[int]:
    """The offset of each record; records of one lane are given in their order. read: in order, from the first record
    of the partition on."""
    order = _ordered(slots)
    known = [slots[n].offset for n in order]
    out = _filled([slots[n] for n in order], _believed(known, read))
    offsets = [0] * len(slots)
    for n, offset in zip(order, out, strict=True):
        offsets[n] = offset
    return offsets


def _ordered(slots: Sequence[UnplacedRecord]) -> list[int]:
    """Their order: known ones by offset; each other one behind the last that was written before it, as far as its own
    slot's order allows."""
    whole = sorted((slot.offset, slot.at) for slot in slots if slot.offset is not None)
    offsets = [offset for offset, _ in whole]
    latest = list(accumulate((at for _, at in whole), max))
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


def _believed(known: Sequence[int | None], read: Sequence[TurnSpan]) -> Sequence[int | None]:
    """The known offsets with those that readers tell, if they fit together."""
    out, at = list(known), 0
    for span in read:
        if at + span.records > len(out) or not span.records:
            break
        for n, offset in ((at, span.first), (at + span.records - 1, span.last)):
            if out[n] not in (None, offset):
                return known
            out[n] = offset
        at += span.records
    told = [(n, offset) for n, offset in enumerate(out) if offset is not None]
    fits = all(b - a >= there - here for (here, a), (there, b) in pairwise(told))
    return out if fits and (not told or told[0][1] >= told[0][0]) else known


def _filled(slots: Sequence[UnplacedRecord], known: Sequence[int | None]) -> list[int]:
    """Every offset, in the order given."""
    limits, limit = [BEHIND] * len(slots), BEHIND
    for n in reversed(range(len(slots))):
        here = known[n]
        limits[n] = limit = limit - 1 if here is None else here
    out, homeless, last = [-1] * len(slots), list[int](), -1
    for n, slot in enumerate(slots):
        here = known[n]
        if here is None:
            marker = n > 0 and (slot.lane, slot.turn) != (slots[n - 1].lane, slots[n - 1].turn)
            here = max(last + 1, min(last + 1 + marker, limits[n]))
            if here > limits[n]:
                homeless.append(n)
                continue
        out[n] = last = here
    taken = set(out)
    for n in homeless:  # no hole where it belongs
        here = limits[n] + 1
        while here in taken:
            here += 1
        out[n] = here
        taken.add(here)
    return out
