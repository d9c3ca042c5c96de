"""Parameters, and their moments, from the shards of all ranks to rank 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from millrace.trainers.backends.parallel.grid import PP, Groups
from millrace.trainers.backends.parallel.regions import ShardedParameter, take
from millrace.trainers.backends.rank_messages import exchange

Item = TypeVar("Item")

BUCKET = 64 * 2**20
"""Elements that one collective of a gathering moves at most (or one parameter, if that is larger)."""


def everywhere(groups: Groups, by_stage: Mapping[int, Sequence[ShardedParameter]]) -> list[ShardedParameter]:
    """The parameters of the whole model, those of other stages too, in one order on all ranks. All ranks call it."""
    ranks: list[Mapping[int, Sequence[ShardedParameter]]] = [by_stage]
    if PP in groups.by_axis:
        ranks = exchange(by_stage, dict[int, list[ShardedParameter]], groups.by_axis[PP])
    stages = {index: parameter for rank in ranks for index, parameter in rank.items()}
    return [parameter for index in sorted(stages) for parameter in stages[index]]


def gather(
    groups: Groups, device: torch.device, parameters: Sequence[ShardedParameter], parts_here: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Full tensors by name on rank 0, on the CPU; empty elsewhere. `parts_here`: this rank's parts of `parameters`, by
    name. One collective a bucket; all ranks of a world above 1 call it."""
    grid, own_rank = groups.grid, groups.rank
    tensors: dict[str, torch.Tensor] = {}
    for bucket in buckets(parameters, lambda parameter: math.prod(parameter.shape)):
        shares = [[parameter for parameter in bucket if parameter.owned_by(grid, rank)] for rank in range(grid.world)]
        sizes = [sum(parameter.numel(grid, rank) for parameter in shares[rank]) for rank in range(grid.world)]
        flat_here = torch.zeros(max(sizes), device=device)
        if shares[own_rank]:
            flat_here[: sizes[own_rank]] = torch.cat(
                [parts_here[parameter.name].reshape(-1) for parameter in shares[own_rank]]
            )
        parts = [torch.empty_like(flat_here) for _ in range(grid.world)] if own_rank == 0 else None
        dist.gather(flat_here, parts, dst=0)
        if parts is None:
            continue
        tensors |= {parameter.name: torch.empty(parameter.shape) for parameter in bucket}
        for rank, flat in enumerate(parts):
            pieces = flat[: sizes[rank]].split([parameter.numel(grid, rank) for parameter in shares[rank]])
            for parameter, piece in zip(shares[rank], pieces, strict=True):
                to = take(tensors[parameter.name], parameter.box(grid, rank))
                to.copy_(piece.view_as(to))
    return tensors


def buckets(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Consecutive `items`, as many at a time as one collective may move; `size` counts the elements of one."""
    bucket: list[Item] = []
    total = 0
    for item in items:
        if bucket and total + size(item) > BUCKET:
            yield bucket
            bucket, total = [], 0
        bucket.append(item)
        total += size(item)
    yield bucket
