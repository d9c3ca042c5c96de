"""Where each rank stands in a layout, and the process groups along each axis.

    rank = ((pp * d + dp) * c + cp) * t + tp        tensor peers are neighbours
    fs   = dp * c + cp                              the ranks that FSDP shards over: context peers too hold shards
    ep   = f % e,  edp = f // e                     with f = fs * t + tp, a rank's number in its stage

`Grid` is arithmetic; `Groups` holds what `form` made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from millrace.trainers.backends.layout import Layout
from millrace.trainers.private_apis.process_groups import limit_waits

PP, DP, CP, TP, FS, EP, EDP = "pp", "dp", "cp", "tp", "fs", "ep", "edp"
AXES = (PP, DP, CP, TP, FS, EP, EDP)
BASE = (PP, DP, CP, TP)
"""Axes that number the ranks."""
COVERED_AXES = {PP: {PP}, DP: {DP}, CP: {CP}, TP: {TP}, FS: {DP, CP}, EP: {DP, CP, TP}, EDP: {DP, CP, TP}}
"""Axis -> the base axes that its ranks differ in."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The coordinates of every rank of a layout."""

    layout: Layout = field(default_factory=Layout)

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.layout.world

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        at = self.layout
        ranks = at.d * at.c * at.t
        return {
            PP: at.p, DP: at.d, CP: at.c, TP: at.t, FS: at.d * at.c, EP: at.e, EDP: ranks // at.e
        }[axis]  # fmt: skip

    def index(self, axis: str, rank: int) -> int:
        """Which of them `rank` is."""
        at = self.layout
        flat = rank % (at.d * at.c * at.t)
        return {
            PP: rank // (at.d * at.c * at.t), DP: flat // (at.c * at.t), CP: flat // at.t % at.c, TP: flat % at.t,
            FS: flat // at.t, EP: flat % at.e, EDP: flat // at.e,
        }[axis]  # fmt: skip

    def peers(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks along an axis through `rank`, in order."""
        stage = self.index(PP, rank)
        if axis in (EP, EDP):
            other_axis = EDP if axis == EP else EP
            at = self.index(other_axis, rank)
            near = (r for r in range(self.world) if self.index(other_axis, r) == at and self.index(PP, r) == stage)
            return tuple(sorted(near, key=lambda r: self.index(axis, r)))
        still = [base for base in BASE if base not in COVERED_AXES[axis]]
        return tuple(
            r for r in range(self.world) if all(self.index(base, r) == self.index(base, rank) for base in still)
        )

    def leads(self, rank: int) -> bool:
        """Whether `rank` speaks for its cell: what a whole cell knows is counted once."""
        return all(self.index(axis, rank) == 0 for axis in (PP, CP, TP))

    def tells(self, rank: int) -> bool:
        """Whether `rank` reports its cell's losses, which the last stage alone knows."""
        return self.index(PP, rank) == self.size(PP) - 1 and all(self.index(axis, rank) == 0 for axis in (CP, TP))


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of one rank along each axis that has more than one rank."""

    grid: Grid
    rank: int
    by_axis: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    meshes: Mapping[str, DeviceMesh] = field(default_factory=dict)

    @classmethod
    def form(cls, grid: Grid, rank: int, device: torch.device, forming: timedelta, timeout: timedelta) -> Groups:
        """Makes them out of the default group, which every rank of the grid has joined. All ranks call it. `forming`:
        longest wait for a peer meanwhile; `timeout`: of collectives later."""
        by_peers: dict[tuple[int, ...], dist.ProcessGroup] = {}
        if grid.world > 1 and dist.group.WORLD is not None:
            by_peers[tuple(range(grid.world))] = dist.group.WORLD
        by_axis = {}
        for axis in AXES:
            if grid.size(axis) == 1:
                continue
            for peers in sorted({grid.peers(axis, peer) for peer in range(grid.world)}):
                if peers not in by_peers:
                    group = dist.new_group(list(peers), timeout=forming)
                    if rank in peers:
                        limit_waits(timeout, group)
                    by_peers[peers] = group
            by_axis[axis] = by_peers[grid.peers(axis, rank)]
        meshes = {
            axis: DeviceMesh.from_group(by_axis[axis], device.type, mesh_dim_names=(axis,))
            for axis in (FS, EDP)
            if axis in by_axis
        }
        return cls(grid, rank, by_axis, meshes)

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return self.grid.size(axis)

    def index(self, axis: str) -> int:
        """Which of them this rank is."""
        return self.grid.index(axis, self.rank)
