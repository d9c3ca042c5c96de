"""Which part of a parameter a rank holds: a box of the full tensor, found by arithmetic alone.

A parameter is cut along axes one after the other, each time in `torch.chunk`s, as FSDP2 does: first by tensor or
expert parallelism, last by FSDP. What an axis does not cut, the ranks along it hold alike; the first of them owns it.
So loading takes boxes out of full tensors without a collective, and gathering pastes the owners' boxes together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from millrace.trainers.backends.parallel.grid import BASE, COVERED_AXES, FS, PP, Grid

Box = tuple[slice, ...]


def dimension_rows(size: int, world: int, rank: int) -> tuple[int, int]:
    """[lo, hi) of a dimension of `size` that `rank` holds of it; ranks beyond the last chunk hold none."""
    share = math.ceil(size / world)
    return min(rank * share, size), min((rank + 1) * share, size)


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A parameter of the whole model: its full shape; (axis, dimension) of each cut, in order; the only pipeline stage
    that has it, or None when all do."""

    name: str
    shape: tuple[int, ...]
    cuts: tuple[tuple[str, int], ...] = ((FS, 0),)
    stage: int | None = None

    def on(self, grid: Grid, rank: int) -> bool:
        """Whether `rank` has a part of it at all."""
        return self.stage is None or grid.index(PP, rank) == self.stage

    def owned_by(self, grid: Grid, rank: int) -> bool:
        """Whether it is `rank` that speaks for its part: of equal copies, one."""
        cut = {base for axis, _ in self.cuts for base in COVERED_AXES[axis]}
        if self.stage is not None:
            cut.add(PP)
        return self.on(grid, rank) and all(grid.index(base, rank) == 0 for base in BASE if base not in cut)

    def box(self, grid: Grid, rank: int, cuts: Sequence[tuple[str, int]] | None = None) -> Box:
        """What `rank` holds, or would hold after the first few `cuts`."""
        bounds = [(0, size) for size in self.shape]
        for axis, dim in self.cuts if cuts is None else cuts:
            lo, hi = bounds[dim]
            first, last = dimension_rows(hi - lo, grid.size(axis), grid.index(axis, rank))
            bounds[dim] = (lo + first, lo + last)
        return tuple(slice(lo, hi) for lo, hi in bounds)

    def before_fsdp(self, grid: Grid, rank: int) -> Box:
        """What `rank` computes with: its box before the last cut, FSDP's."""
        return self.box(grid, rank, self.cuts[:-1])

    def numel(self, grid: Grid, rank: int) -> int:
        """Elements of the box."""
        return math.prod(at.stop - at.start for at in self.box(grid, rank))


def take(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The box of a full tensor, as a view."""
    return tensor[box] if box else tensor
