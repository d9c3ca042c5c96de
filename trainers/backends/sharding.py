"""How FSDP2 cuts a parameter: dimension 0 in `torch.chunk`s, one a rank; ranks beyond the last chunk hold none of
it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def rows(size: int, world: int, rank: int) -> tuple[int, int]:
    """[lo, hi) of dimension 0 that `rank` holds."""
    each = math.ceil(size / world)
    return min(rank * each, size), min((rank + 1) * each, size)


def part(tensor: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    """This rank's rows of a full tensor, as a view; the whole of it in a world of 1."""
    if world == 1:
        return tensor
    lo, hi = rows(tensor.shape[0], world, rank)
    return tensor[lo:hi]


def numel(shape: Sequence[int], world: int, rank: int) -> int:
    """Elements of a tensor of `shape` that `rank` holds."""
    if world == 1:
        return math.prod(shape)
    lo, hi = rows(shape[0], world, rank)
    return (hi - lo) * math.prod(shape[1:])
