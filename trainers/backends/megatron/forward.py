"""A micro-batch on its way through Megatron's parallel dimensions, and what an algorithm sees at the end.

    Feed:    this rank's tokens of the packed row (T padded so that t and c divide it, then cut in c parts)
    Outcome: the last stage's logits as the algorithms' `Run`

Under context parallelism each rank has the log-probabilities of its own part of the row; all parts are gathered in
order, each rank computes the whole loss, and the gradient that flows back is that of its own part alone. So summing
gradients over the ranks counts every token once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainers.backends.forward import Compared
from trainers.backends.layout import Layout
from trainers.batches.packing import Packed
from trainers.errors import BadConfiguration


@dataclass(frozen=True, slots=True)
class Feed:
    """tokens, positions int64[1, T/c]; mask as `model.PackedAttention` takes it; rows int64[m]: of this part, those
    that predict a label; counts: m of every part."""

    batch: Packed
    tokens: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor
    counts: tuple[int, ...]


def feed(batch: Packed, layout: Layout, part: int) -> Feed:
    """Part `part` of layout.c of `batch`, which is on its device already."""
    device = batch.tokens.device
    total = batch.tokens.shape[1]
    extra = -total % (layout.c * layout.t)
    tokens, positions = (torch.nn.functional.pad(x, (0, extra)) for x in (batch.tokens, batch.positions))
    bounds = [(run.start, run.count, run.length) for run in batch.runs]
    if extra:
        bounds.append((total, extra, 1))  # idle tokens, each a sample of its own
    each = (total + extra) // layout.c
    mine = slice(part * each, (part + 1) * each)
    if layout.c == 1:
        mask = torch.tensor(bounds, dtype=torch.int64)
    else:
        owners = torch.repeat_interleave(
            torch.tensor([length for _, count, length in bounds for _ in range(count)], device=device)
        )
        steps = torch.arange(total + extra, device=device)
        mask = (owners[mine, None] == owners[None]) & (steps[mine, None] >= steps[None])
    of = torch.div(batch.at, each, rounding_mode="floor")
    counts = tuple(torch.bincount(of, minlength=layout.c).tolist())
    rows = batch.at[of == part] - part * each
    return Feed(batch, tokens[:, mine], positions[:, mine], mask, rows, counts)


class _Parts(torch.autograd.Function):
    """Joins the parts of all ranks of a group along dimension 0; the gradient of the own part flows back."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, counts: tuple[int, ...], group: ProcessGroup) -> torch.Tensor:
        rank = dist.get_rank(group)
        ctx.own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        padded = mine.new_zeros((max(counts), *mine.shape[1:]))
        padded[: mine.shape[0]] = mine
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient[ctx.own], None, None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The `Run` of a micro-batch whose forward pass is done. output: float32[m, V], or [T/c] of scalar models; group:
    of context parallelism, None without; teacher: computes the teacher's `distribution` of the same part."""

    batch: Packed
    output: torch.Tensor
    counts: tuple[int, ...]
    group: ProcessGroup | None
    teacher: Callable[[float], torch.Tensor] | None = None

    def tokens(self, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities float32[M] of the labels, with gradient where enabled, and entropies float32[M]."""
        mine, labels = self.distribution(temperature), self.batch.labels
        if self.group is not None:
            before = sum(self.counts[: dist.get_rank(self.group)])
            labels = labels[before : before + mine.shape[0]]
        return self._whole(mine.gather(-1, labels[:, None])[:, 0]), self._whole(_entropy(mine))

    def compared(self, temperature: float, of: Compared) -> tuple[torch.Tensor, torch.Tensor]:
        """float32[M] that `of` makes of this model's and the teacher's log-probabilities float32[n, V]; entropies
        float32[M] of this model."""
        if self.teacher is None:
            raise BadConfiguration("no teacher; hold one beside the policy first")
        mine = self.distribution(temperature)
        return self._whole(of(mine, self.teacher(temperature))), self._whole(_entropy(mine))

    def distribution(self, temperature: float) -> torch.Tensor:
        """Log-probabilities float32[m, V] of this part's labels."""
        return torch.log_softmax(self.output.float() / temperature, dim=-1)

    def values(self) -> torch.Tensor:
        """float32[T]."""
        values = self.output.float()
        if self.group is not None:
            each = (values.shape[0],) * len(self.counts)
            values = _join(values, each, self.group)
        return values[: self.batch.tokens.shape[1]]

    def _whole(self, mine: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return mine
        return _join(mine, self.counts, self.group)


def _entropy(distribution: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return -(distribution.exp() * distribution).sum(-1)


def _join(mine: torch.Tensor, counts: tuple[int, ...], group: ProcessGroup) -> torch.Tensor:
    apply: Any = _Parts.apply
    joined: torch.Tensor = apply(mine, counts, group)
    return joined
