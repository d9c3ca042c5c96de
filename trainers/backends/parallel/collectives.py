"""Collectives with gradients, between the ranks of one axis.

gather_rows    pieces of rows -> whole rows       transpose: sum over ranks, scatter
scatter_rows   partial sums -> pieces of the sum  transpose: gather
join           pieces -> the whole                its gradient is the same on every rank: each takes its piece's
exchange       rows for other ranks -> rows from them; its transpose is the way back
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from millrace.trainers.phase_clock import COLLECTIVES, Clock


@dataclass(frozen=True, slots=True, eq=False)
class Team:
    """The ranks along one axis, and which of them this one is."""

    group: dist.ProcessGroup
    rank: int
    size: int
    clock: Clock


class _SpoolEntry(Protocol):
    """What a function remembers for its gradient: each sets some of these."""

    team: Team
    dim: int
    out_counts: list[int]
    came: list[int]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _SpoolEntry, piece: torch.Tensor, team: Team) -> torch.Tensor:
        ctx.team = team
        return _all_gather(piece, team)

    @staticmethod
    def backward(ctx: _SpoolEntry, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduce_scatter(gradients[0], ctx.team), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _SpoolEntry, partial: torch.Tensor, team: Team) -> torch.Tensor:
        ctx.team = team
        return _reduce_scatter(partial, team)

    @staticmethod
    def backward(ctx: _SpoolEntry, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_gather(gradients[0], ctx.team), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _SpoolEntry, piece: torch.Tensor, dim: int, team: Team) -> torch.Tensor:
        ctx.team, ctx.dim = team, dim
        pieces = [torch.empty_like(piece, memory_format=torch.contiguous_format) for _ in range(team.size)]
        if piece.numel() > 0:
            with team.clock.phase(COLLECTIVES):
                dist.all_gather(pieces, piece.contiguous(), group=team.group)
        return torch.cat(pieces, dim)

    @staticmethod
    def backward(ctx: _SpoolEntry, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        piece = gradients[0].chunk(ctx.team.size, ctx.dim)[ctx.team.rank]
        return piece.contiguous(), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _SpoolEntry, rows: torch.Tensor, out_counts: list[int], came: list[int], team: Team
    ) -> torch.Tensor:
        ctx.out_counts, ctx.came, ctx.team = out_counts, came, team
        return _all_to_all(rows, out_counts, came, team)

    @staticmethod
    def backward(ctx: _SpoolEntry, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(gradients[0], ctx.came, ctx.out_counts, ctx.team), None, None, None


gather_rows: Callable[[torch.Tensor, Team], torch.Tensor] = _Gather.apply
"""[1, T/n, ...] of each rank -> [1, T, ...] on all, which go on with different parts of the computation."""

scatter_rows: Callable[[torch.Tensor, Team], torch.Tensor] = _Scatter.apply
"""[1, T, ...] of each rank, to be summed -> [1, T/n, ...], this rank's rows of the sum."""

join: Callable[[torch.Tensor, int, Team], torch.Tensor] = _Join.apply
"""Equal pieces along a dimension -> the whole on all ranks, which go on with the same computation."""

exchange: Callable[[torch.Tensor, list[int], list[int], Team], torch.Tensor] = _Exchange.apply
"""[sum sent, H], sent[r] rows for rank r, one rank after another -> [sum came, H], came[r] rows from rank r."""


def _all_gather(piece: torch.Tensor, team: Team) -> torch.Tensor:
    _, length, *rest = piece.shape
    out = piece.new_empty((team.size * length, *rest))
    if out.numel() > 0:
        with team.clock.phase(COLLECTIVES):
            dist.all_gather_single(out, piece[0].contiguous(), group=team.group)
    return out[None]


def _reduce_scatter(partial: torch.Tensor, team: Team) -> torch.Tensor:
    _, length, *rest = partial.shape
    piece = partial.new_empty((length // team.size, *rest))
    if piece.numel() > 0:
        with team.clock.phase(COLLECTIVES):
            dist.reduce_scatter_single(piece, partial[0].contiguous(), group=team.group)
    return piece[None]


def _all_to_all(rows: torch.Tensor, out_counts: list[int], came: list[int], team: Team) -> torch.Tensor:
    out = rows.new_empty((sum(came), *rows.shape[1:]))
    with team.clock.phase(COLLECTIVES):
        dist.all_to_all_single(out, rows.contiguous(), came, out_counts, group=team.group)
    return out
