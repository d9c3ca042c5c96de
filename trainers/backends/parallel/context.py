"""Context parallelism: the ranks of a cell share the positions of each packed row (Ulysses).

    embedding, norms, MLP, head     each rank for its own slice of the row (`slices.py`)
    attention                       all-to-all: a rank gets the whole row for 1/c of the heads, attends as one process
                                    would, and all-to-all back
    log-probabilities, values       gathered, so that every rank evaluates the same loss of the whole micro-batch
    gradients                       each rank's are of its own positions; their sum over the ranks is the gradient

So samples are never cut for attention, no mask is built, the load is balanced for any mix of lengths, and losses that
need whole samples or groups (sequence ratios, pairs) are as they are without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel

from millrace.trainers.backends.models.forward import ForwardPass, LogprobComparison
from millrace.trainers.backends.parallel.grid import CP, Groups
from millrace.trainers.backends.parallel.slices import Slice, spans, take
from millrace.trainers.batches.attention import packed_attention, register
from millrace.trainers.batches.packing import MicroBatch
from millrace.trainers.errors import BadConfiguration
from millrace.trainers.phase_clock import COLLECTIVES, Clock
from millrace.trainers.private_apis.transformers import set_attention

NAME = "millrace_packed_context"


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """The ranks that share this rank's rows, in the order of their slices."""

    group: dist.ProcessGroup
    rank: int
    size: int
    clock: Clock


def context_of(groups: Groups, clock: Clock) -> Context | None:
    """The context peers of this rank, if it has any."""
    if CP not in groups.by_axis:
        return None
    return Context(groups.by_axis[CP], groups.index(CP), groups.size(CP), clock)


def spread(model: PreTrainedModel, size: int, tensor: int = 1) -> None:
    """Makes a model attend over `size` context ranks, of which each has 1 / `tensor` of the heads. BadConfiguration
    where the heads do not divide."""
    heads = int(model.config.num_attention_heads) // tensor
    if heads % size:
        raise BadConfiguration(
            f"{heads} attention heads{' a tensor rank' if tensor > 1 else ''} do not divide over c{size}: each context "
            "rank attends for its share of the heads; choose a c that divides them"
        )
    for module in model.modules():
        config = getattr(module, "config", None)  # a pipeline stage has another one than its attention layers
        if isinstance(config, PretrainedConfig):
            set_attention(config, NAME)


class _SpoolEntry(Protocol):
    """What a function remembers for its gradient: each sets one of these."""

    context: Context
    span: tuple[int, int]


class _Exchange(torch.autograd.Function):
    """x [c, ...] -> [c, ...]: entry j goes to rank j, entry i comes from rank i. Its own transpose."""

    @staticmethod
    def forward(ctx: _SpoolEntry, x: torch.Tensor, context: Context) -> torch.Tensor:
        ctx.context = context
        return _all_to_all(x, context)

    @staticmethod
    def backward(ctx: _SpoolEntry, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(gradients[0], ctx.context), None


_exchange: Callable[[torch.Tensor, Context], torch.Tensor] = _Exchange.apply


def _all_to_all(x: torch.Tensor, context: Context) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    with context.clock.phase(COLLECTIVES):
        dist.all_to_all_single(out, x, group=context.group)
    return out


class _Join(torch.autograd.Function):
    """[n_r, ...] of each rank -> [sum n, ...] on all of them. Every rank goes on with the same function of the whole,
    so each takes the gradient of its own part and nothing is summed."""

    @staticmethod
    def forward(ctx: _SpoolEntry, mine: torch.Tensor, counts: tuple[int, ...], context: Context) -> torch.Tensor:
        ctx.span = spans(counts, context.rank)
        widest = max(counts)
        if widest == 0:
            return mine.clone()
        row = mine.new_zeros((widest, *mine.shape[1:]))
        row[: len(mine)] = mine
        rows = [torch.empty_like(row) for _ in counts]
        with context.clock.phase(COLLECTIVES):
            dist.all_gather(rows, row, group=context.group)
        return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])

    @staticmethod
    def backward(ctx: _SpoolEntry, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        lo, hi = ctx.span
        return gradients[0][lo:hi], None, None


_join: Callable[[torch.Tensor, tuple[int, ...], Context], torch.Tensor] = _Join.apply


def join(piece: torch.Tensor, counts: Sequence[int], context: Context) -> torch.Tensor:
    """The ranks' rows one after another, counts[r] of rank r; differentiable where every rank computes the same of
    it."""
    return _join(piece, tuple(counts), context)


def to_heads(x: torch.Tensor, context: Context) -> torch.Tensor:
    """[1, H, T/c, D] of all heads -> [1, H/c, T, D] of all positions."""
    _, heads, length, width = x.shape
    came = _exchange(x.view(context.size, heads // context.size, length, width), context)
    return came.transpose(0, 1).reshape(1, heads // context.size, context.size * length, width)


def to_positions(x: torch.Tensor, context: Context) -> torch.Tensor:
    """[1, T, H/c, D] of all positions -> [1, T/c, H, D] of all heads."""
    _, length, heads, width = x.shape
    came = _exchange(x.view(context.size, length // context.size, heads, width), context)
    return came.transpose(0, 1).reshape(1, length // context.size, context.size * heads, width)


def context_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    context: Context | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """`packed_attention` of slices: query [1, H, T/c, D], key and value [1, KV, T/c, D] -> [1, T/c, H, D]."""
    if context is None:
        return packed_attention(module, query, key, value, attention_mask, **rest)
    repeats = math.lcm(key.shape[1], context.size) // key.shape[1]
    if repeats > 1:  # fewer key heads than ranks: neighbours get the same one
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    query, key, value = (to_heads(x.contiguous(), context) for x in (query, key, value))
    attention, _ = packed_attention(module, query, key, value, attention_mask, **rest)
    return to_positions(attention.contiguous(), context), None


@dataclass(frozen=True, slots=True)
class ContextPass:
    """The `Run` of a micro-batch whose positions the ranks of `context` share: a pass of this rank's slice, whose
    outcome is joined."""

    batch: MicroBatch
    slice: Slice
    inner: ForwardPass
    context: Context

    def tokens(self, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """As `ForwardPass.tokens` of the whole micro-batch."""
        logprobs, entropy = self.inner.tokens(temperature)
        return self._labels(logprobs), self._labels(entropy)

    def comparison(self, temperature: float, of: LogprobComparison) -> tuple[torch.Tensor, torch.Tensor]:
        """As `ForwardPass.comparison` of the whole micro-batch."""
        gaps, entropy = self.inner.comparison(temperature, of)
        return self._labels(gaps), self._labels(entropy)

    def hidden(self) -> torch.Tensor:
        """What a pipeline stage before the last passes on of this rank's slice."""
        return self.inner.hidden()

    def values(self) -> torch.Tensor:
        """As `ForwardPass.values` of the whole micro-batch."""
        length = self.slice.batch.tokens.shape[1]
        return join(self.inner.values(), [length] * self.context.size, self.context)[: self.slice.length]

    def _labels(self, rows: torch.Tensor) -> torch.Tensor:
        return join(rows, self.slice.labels, self.context)[self.slice.order]


def context_pass(full_pass: ForwardPass, context: Context) -> ContextPass:
    """`full_pass`, a pass of a micro-batch on the device, over the ranks of `context`."""
    piece = take(full_pass.batch, context.rank, context.size)
    inner = replace(full_pass, batch=piece.batch, extra={**full_pass.extra, "context": context})
    return ContextPass(full_pass.batch, piece, inner, context)


register(NAME, context_attention)
