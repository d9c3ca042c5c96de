"""Parameters, and their moments, from the shards of all ranks to rank 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from millrace.trainers.backends.parallel.grid import PP, Groups
from millrace.trainers.backends.parallel.regions import Held, take
from millrace.trainers.backends.rank_messages import exchange

Item = TypeVar("Item")

BUCKET = 64 * 2**20
"""Elements that one collective of a gathering moves at most (or one parameter, if that is larger)."""


def everywhere(groups: Groups, by_stage: Mapping[int, Sequence[Held]]) -> list[Held]:
    """The parameters of the whole model, those of other stages too, in the same order on every rank. All ranks call
    it."""
    ranks: list[Mapping[int, Sequence[Held]]] = [by_stage]
    if PP in groups.by_axis:
        ranks = exchange(by_stage, dict[int, list[Held]], groups.by_axis[PP])
    stages = {index: held for rank in ranks for index, held in rank.items()}
    return [held for index in sorted(stages) for held in stages[index]]


def gather(
    groups: Groups, device: torch.device, whole: Sequence[Held], mine: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Full tensors by name on rank 0, on the CPU; empty elsewhere. `mine`: this rank's parts of `whole`, by name. One
    collective a bucket; all ranks call it."""
    grid, me = groups.grid, groups.rank
    if grid.world == 1:
        return {name: shard.to("cpu", copy=True) for name, shard in mine.items()}
    full: dict[str, torch.Tensor] = {}
    for bucket in buckets(whole, lambda held: math.prod(held.shape)):
        owned = [[held for held in bucket if held.owned_by(grid, rank)] for rank in range(grid.world)]
        sizes = [sum(held.numel(grid, rank) for held in owned[rank]) for rank in range(grid.world)]
        sent = torch.zeros(max(sizes), device=device)
        if owned[me]:
            sent[: sizes[me]] = torch.cat([mine[held.name].reshape(-1) for held in owned[me]])
        parts = [torch.empty_like(sent) for _ in range(grid.world)] if me == 0 else None
        dist.gather(sent, parts, dst=0)
        if parts is None:
            continue
        full |= {held.name: torch.empty(held.shape) for held in bucket}
        for rank, flat in enumerate(parts):
            pieces = flat[: sizes[rank]].split([held.numel(grid, rank) for held in owned[rank]])
            for held, piece in zip(owned[rank], pieces, strict=True):
                to = take(full[held.name], held.box(grid, rank))
                to.copy_(piece.view_as(to))
    return full


def buckets(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Consecutive `items`, as many at a time as one collective may move; `size` counts the elements of one."""
    bucket: list[Item] = []
    filled = 0
    for item in items:
        if bucket and filled + size(item) > BUCKET:
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += size(item)
    yield bucket
