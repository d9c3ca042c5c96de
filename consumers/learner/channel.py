"""What the ranks of a formed group say to each other at a boundary: flags up, one verdict down.

Invariant: all ranks call each function together, in the same order; with one rank nothing is sent. Messages go over the
CPU (gloo), whatever the backend trains on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def count(flags: Sequence[int], world: int) -> list[int]:
    """How many ranks raised each flag; every rank learns it."""
    if world == 1:
        return [int(flag) for flag in flags]
    vector = torch.tensor([int(flag) for flag in flags], dtype=torch.int64)
    dist.all_reduce(vector)
    return [int(value) for value in vector]


def worst(codes: list[int], world: int) -> list[int]:
    """The largest of each code over the ranks."""
    vector = torch.tensor(codes, dtype=torch.int64)
    if world > 1:
        dist.all_reduce(vector, op=dist.ReduceOp.MAX)
    return [int(value) for value in vector]


def by_rank(value: int, rank: int, world: int) -> list[int]:
    """What each rank says."""
    return count([value if other == rank else 0 for other in range(world)], world)


def tell(message: bytes | None, world: int) -> bytes:
    """Rank 0's message (the others pass None) on every rank."""
    if world == 1:
        return message or b""
    size = torch.tensor([len(message or b"")], dtype=torch.int64)
    dist.broadcast(size, 0)
    data = torch.empty(int(size), dtype=torch.uint8)
    if message is not None:
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    dist.broadcast(data, 0)
    return bytes(data.numpy().tobytes())
