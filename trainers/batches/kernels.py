"""Attention of a packed row in one call a layer: kernels for stretches of unlike lengths.

    queries of stretch i   rows [queries[i], queries[i+1]) of [T, H, D]
    keys of stretch i      rows [keys[i], keys[i+1]) of [K, KV, D], the end of both at the same token

Keys of grouped heads are not repeated, and a stretch that adds to a shared beginning reads its keys along its path, so
K is above T there. `varlen` is torch's own flash attention, `flash_attn` the package of that name where it is
installed. What neither computes (float32, a CPU, sinks, heads of unlike widths) `attention.py` computes by runs.

Invariant: a kernel is asked only for what it computes; `refusal` says why not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate

import torch
from torch.nn.attention.varlen import varlen_attn

from millrace.trainers.batches.packing import SampleRun

WIDEST = 256
"""the widest head of flash attention"""
CAPABILITY = (8, 0)
"""of the oldest card that has flash attention"""


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """Where queries and keys of each stretch lie. queries, keys int32[N+1]; longest_query, longest_key: tokens;
    places int64[K], the places of the keys in the row, None where they are the row itself."""

    queries: torch.Tensor
    keys: torch.Tensor
    longest_query: int
    longest_key: int
    places: torch.Tensor | None


def stretches(runs: Sequence[SampleRun], paths: torch.Tensor | None, device: torch.device) -> Stretches:
    """Of a micro-batch's `runs` and `paths` (see `MicroBatch`)."""
    lengths = [run.length for run in runs for _ in range(run.count)]
    widths = [run.prefix + run.length for run in runs for _ in range(run.count)]
    bounds = torch.tensor([[*accumulate(sizes, initial=0)] for sizes in (lengths, widths)], dtype=torch.int32)
    queries, keys = bounds.to(device, non_blocking=True)
    places = None if paths is None else _places(runs, paths.to(device))
    return Stretches(queries, keys, max(lengths), max(widths), places)


def _places(runs: Sequence[SampleRun], paths: torch.Tensor) -> torch.Tensor:
    """int64[K]: of a run without a prefix its own rows, of the others their paths."""
    parts, at = [], 0
    for run in runs:
        if run.prefix:
            size = run.count * (run.prefix + run.length)
            parts.append(paths[at : at + size])
            at += size
        else:
            parts.append(torch.arange(run.start, run.start + run.count * run.length, device=paths.device))
    return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class Request:
    """What a layer asks for. width: of heads of queries and keys; value_width: of those of values; window: tokens that
    one sees, itself among them, None for all; softcap: bound of the scores; sinks: whether heads have one."""

    device: torch.device
    dtype: torch.dtype
    width: int
    value_width: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dropout: float = 0.0


class VarlenKernel(ABC):
    """One kernel for stretches of unlike lengths."""

    name: str
    """as records have it"""

    @abstractmethod
    def refusal(self, request: Request) -> str | None:
        """Why it does not compute that, None: it does."""

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        where: Stretches,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """query [T, H, D], key and value [K, KV, D] -> [T, H, D], causal within each stretch."""


def _common_refusal(request: Request) -> str | None:
    """What no flash attention computes."""
    if request.device.type != "cuda":
        return "not on a GPU"
    if request.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in {str(request.dtype).removeprefix('torch.')}"
    if _capability(request.device) < CAPABILITY:
        return "the card has no flash attention"
    if request.width != request.value_width or request.width > WIDEST or request.width % 8:
        return f"heads of {request.width} and {request.value_width}"
    if request.sinks:
        return "attention sinks"
    return "dropout" if request.dropout else None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


class TorchVarlen(VarlenKernel):
    """torch's own, `torch.nn.attention.varlen`."""

    name = "varlen"

    def refusal(self, request: Request) -> str | None:
        return _common_refusal(request) or ("a cap on scores" if request.softcap is not None else None)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        where: Stretches,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        attention = varlen_attn(
            query,
            key,
            value,
            where.queries,
            where.keys,
            where.longest_query,
            where.longest_key,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(attention, torch.Tensor), "nothing else was asked for"
        return attention


class FlashAttn(VarlenKernel):
    """The package flash-attn, which caps scores too."""

    name = "flash_attn"

    def refusal(self, request: Request) -> str | None:
        return "not installed" if find_spec(self.name) is None else _common_refusal(request)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        where: Stretches,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        attention: torch.Tensor = import_module(self.name).flash_attn_varlen_func(
            query,
            key,
            value,
            where.queries,
            where.keys,
            where.longest_query,
            where.longest_key,
            softmax_scale=scaling,
            causal=True,
            window_size=(-1 if window is None else window - 1, 0),
            softcap=softcap or 0.0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return attention


KERNELS: list[VarlenKernel] = [FlashAttn(), TorchVarlen()]
"""in the order in which they are asked"""


def kernel_for(request: Request) -> VarlenKernel | None:
    """The first that computes it; None where attention goes by runs."""
    return next((kernel for kernel in KERNELS if kernel.refusal(request) is None), None)
