"""Which units lie in which bin: micro-batches by a budget of tokens. Pure: equal sizes give equal bins, always.

    sequential   in the order given, a new bin where the next unit does not fit
    ffd          largest first, into the bin of fewest units among those with room; more bins only when none has any
    kk           Karmarkar and Karp's largest differencing: the most even bins of a number that is known before

Invariants: each unit is in exactly one bin; the units of a bin, and bins by their first units, keep the order given; no
bin is empty; none is over `capacity` but for a single unit that is larger by itself; there are at least `least` bins
and a multiple of `divisor`, as far as there are units for them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import TypeAlias

from millrace.trainers.errors import BadConfiguration

Bins: TypeAlias = list[list[int]]
"""Indices of units."""


def divide(sizes: Sequence[int], capacity: int, *, packing: str, least: int = 1, divisor: int = 1) -> Bins:
    """Bins of units of these sizes. Units larger than the capacity lie alone."""
    if packing not in ALLOCATORS:
        raise BadConfiguration(f"no packing {packing!r}: choose one of {', '.join(ALLOCATORS)}")
    if capacity < 1 or least < 1 or divisor < 1:
        raise BadConfiguration("capacity, least and divisor must be above 0")
    if not sizes:
        return []
    fits = [index for index, size in enumerate(sizes) if size <= capacity]
    alone = [[index] for index, size in enumerate(sizes) if size > capacity]
    count = least
    while True:
        below = min(max(1, count - len(alone)), len(fits))
        sets = ALLOCATORS[packing]([sizes[index] for index in fits], capacity, below) if fits else []
        bins = [[fits[index] for index in sorted(members)] for members in sets] + alone
        target = min(math.ceil(max(len(bins), least) / divisor) * divisor, len(sizes))
        if len(bins) >= target or count >= target:
            break
        count = target
    while len(bins) < target:
        bins.extend(_halves(bins.pop(bins.index(max(bins, key=len)))))
    return sorted(bins)


def _halves(members: list[int]) -> Bins:
    return [members[: len(members) // 2], members[len(members) // 2 :]]


def sequential(sizes: Sequence[int], capacity: int, least: int) -> Bins:
    """Next fit. `least` is left to the caller."""
    bins: Bins = []
    room = 0
    for index, size in enumerate(sizes):
        if not bins or size > room:
            bins.append([])
            room = capacity
        bins[-1].append(index)
        room -= size
    return bins


def ffd(sizes: Sequence[int], capacity: int, least: int) -> Bins:
    """First fit decreasing, balanced by number of units: a unit goes to the bin of fewest units (then least load) that
    has room, and to a new bin where fewer than `least` exist or the least loaded one has none."""
    bins: Bins = []
    loads: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        by_load = sorted(range(len(bins)), key=lambda b: (loads[b], b))
        if len(bins) < least or loads[by_load[0]] + sizes[index] > capacity:
            bins.append([index])
            loads.append(sizes[index])
            continue
        lightest = min((b for b in by_load if loads[b] + sizes[index] <= capacity), key=lambda b: len(bins[b]))
        bins[lightest].append(index)
        loads[lightest] += sizes[index]
    return bins


def kk(sizes: Sequence[int], capacity: int, least: int) -> Bins:
    """Largest differencing: as many bins as the total needs (at least `least`), and more, as `ffd` packs them, where
    one of those is over the capacity."""
    number = min(max(least, math.ceil(sum(sizes) / capacity)), len(sizes))
    bins = differencing(sizes, number)
    if any(sum(sizes[index] for index in members) > capacity for members in bins):
        return ffd(sizes, capacity, number)
    return bins


def differencing(sizes: Sequence[int], number: int) -> Bins:
    """`number` sets, none empty where there are units for all. Every unit begins as a partition of one set and number -
    1 empty ones; the two partitions of largest spread are merged, the largest set of one with the smallest of the other
    and so on, until one is left."""
    order = count()
    heap: list[tuple[int, int, list[_Set]]] = []
    for index, size in enumerate(sizes):
        first: list[_Set] = [(0, 0, ())] * (number - 1) + [(size, 1, (index,))]
        heap.append((-size, next(order), first))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, one), (_, _, two) = heapq.heappop(heap), heapq.heappop(heap)
        union = sorted(
            (a[0] + b[0], a[1] + b[1], tuple(sorted(a[2] + b[2]))) for a, b in zip(one, reversed(two), strict=True)
        )
        heapq.heappush(heap, (union[0][0] - union[-1][0], next(order), union))
    bins = [list(members) for _, _, members in heap[0][2]]
    while not all(bins) and len(sizes) >= number:
        bins[bins.index([])].append(max(bins, key=len).pop())
    return [members for members in bins if members]


_Set: TypeAlias = tuple[int, int, tuple[int, ...]]
"""Sum, number of units, units: sets are compared in this order."""

ALLOCATORS: Mapping[str, Callable[[Sequence[int], int, int], Bins]] = {
    "sequential": sequential,
    "ffd": ffd,
    "kk": kk,
}
"""By name: (sizes, capacity, least) -> bins."""
