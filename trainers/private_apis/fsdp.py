"""FSDP2: its collectives, timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from millrace.trainers.phase_clock import COLLECTIVES, Clock


class _TimedCollective:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A plain buffer for the collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class TimedAllGather(_TimedCollective, AllGather):
    """Gathers a layer's shards before it is used."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._clock.phase(COLLECTIVES):
            work: dist.Work | None = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class TimedReduceScatter(_TimedCollective, ReduceScatter):
    """Sums a layer's gradients over the ranks and leaves each its shard."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._clock.phase(COLLECTIVES):
            work: dist.Work | None = dist.reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        return work
