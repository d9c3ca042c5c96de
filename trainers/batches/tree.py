"""Samples that begin alike share their beginning: its tokens are computed once.

Samples are put in the order of their tokens, so that each has its longest common beginning with all before it in common
with the one just before. What it adds is its branch; the packed row is all branches. A branch's tokens attend to the
path from the root to themselves: the beginning, wherever it lies in the row, then the branch up to the token. Positions
count from the root. So every token sees exactly what it sees in its own sample, and gradients of a shared token are
the sums over all samples that it begins.

Invariants: the layout depends on the samples' tokens alone, not on their order; a row has as many tokens as there are
different beginnings of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Tokens = Sequence[NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class Branch:
    """`length` tokens from `start` on in the row, after `prefix` tokens that lie elsewhere, of sample `sample`."""

    start: int
    prefix: int
    length: int
    sample: int


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """branches: in the order of the row, those of one shape side by side. places[i]: where each token of sample i lies,
    int64[its length]."""

    branches: tuple[Branch, ...]
    places: tuple[Ints, ...]


def common(one: NDArray[np.int32], two: NDArray[np.int32]) -> int:
    """How many tokens two samples have in common at their beginning."""
    length = min(len(one), len(two))
    differs = np.flatnonzero(one[:length] != two[:length])
    return int(differs[0]) if len(differs) else length


def order(samples: Tokens) -> list[int]:
    """Indices by tokens; of equal samples, and of one that begins another, the former first."""
    return sorted(range(len(samples)), key=lambda index: (samples[index].astype(">u4").tobytes(), index))


def branch_order(samples: Tokens) -> tuple[list[int], list[int]]:
    """The samples' order, and how many tokens each of these has in common with the one before."""
    in_order = order(samples)
    overlaps = [0, *(common(samples[one], samples[two]) for one, two in pairwise(in_order))]
    return in_order, overlaps[: len(in_order)]


def size(samples: Tokens) -> int:
    """Tokens of the row."""
    in_order, overlaps = branch_order(samples)
    return sum(len(samples[index]) - start for index, start in zip(in_order, overlaps, strict=True))


def layout(samples: Tokens) -> TreeLayout:
    """Where each token of each sample lies."""
    in_order, overlaps = branch_order(samples)
    fresh = [(start, len(samples[i]) - start, at) for at, (i, start) in enumerate(zip(in_order, overlaps, strict=True))]
    starts = [0] * len(in_order)
    branches: list[Branch] = []
    base = 0
    for prefix, length, at in sorted(branch for branch in fresh if branch[1]):
        starts[at] = base
        branches.append(Branch(base, prefix, length, in_order[at]))
        base += length
    places: list[Ints] = [np.zeros(0, np.int64)] * len(samples)
    path = np.zeros(0, np.int64)
    for at, (prefix, length, _) in enumerate(fresh):
        path = np.concatenate([path[:prefix], np.arange(starts[at], starts[at] + length)])
        places[in_order[at]] = path
    return TreeLayout(tuple(branches), tuple(places))


def pieces(samples: Tokens, budget: int) -> list[list[int]]:
    """Samples by index in pieces of at most `budget` tokens in the row (what is longer goes alone), neighbours in the
    tree together."""
    out: list[list[int]] = []
    room = 0
    for index, start in zip(*branch_order(samples), strict=True):
        cost = len(samples[index]) - start
        if not out or cost > room:
            out.append([])
            room, cost = budget, len(samples[index])  # the first of a piece has its whole beginning in it
        out[-1].append(index)
        room -= cost
    return out
