"""A micro-batch on its way through Megatron's parallel dimensions, and what an algorithm sees at the end.

    Feed:    this rank's tokens of the packed row (T padded so that t and c divide it, then cut in c parts)
    Outcome: what the last stage has, as the algorithms' `Run`; its logits exist a few rows at a time

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
from torch.utils.checkpoint import checkpoint

from millrace.trainers.backends.layout import Layout
from millrace.trainers.backends.models.forward import LogprobComparison, entropies
from millrace.trainers.backends.models.head import Of, Rows
from millrace.trainers.batches.packing import MicroBatch
from millrace.trainers.errors import BadConfiguration


@dataclass(frozen=True, slots=True)
class Feed:
    """tokens, positions int64[1, T/c]; mask as `model.PackedAttention` takes it; rows int64[m]: of this part, those
    that predict a label; counts: m of every part."""

    batch: MicroBatch
    tokens: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor
    counts: tuple[int, ...]


def feed(batch: MicroBatch, layout: Layout, part: int) -> Feed:
    """Part `part` of layout.c of `batch`, which is on its device already."""
    device = batch.tokens.device
    total = batch.tokens.shape[1]
    extra = -total % (layout.c * layout.t)
    tokens, positions = (torch.nn.functional.pad(x, (0, extra)) for x in (batch.tokens, batch.positions))
    bounds = [(run.start, run.count, run.length) for run in batch.runs]
    if extra:
        bounds.append((total, extra, 1))  # idle tokens, each a sample of its own
    width = (total + extra) // layout.c
    piece = slice(part * width, (part + 1) * width)
    if layout.c == 1:
        mask = torch.tensor(bounds, dtype=torch.int64)
    else:
        owners = torch.repeat_interleave(
            torch.tensor([length for _, count, length in bounds for _ in range(count)], device=device)
        )
        steps = torch.arange(total + extra, device=device)
        mask = (owners[piece, None] == owners[None]) & (steps[piece, None] >= steps[None])
    of = torch.div(batch.at, width, rounding_mode="floor")
    counts = tuple(torch.bincount(of, minlength=layout.c).tolist())
    rows = batch.at[of == part] - part * width
    return Feed(batch, tokens[:, piece], positions[:, piece], mask, rows, counts)


class _Parts(torch.autograd.Function):
    """Joins the parts of all ranks of a group along dimension 0; the gradient of the own part flows back."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, counts: tuple[int, ...], group: ProcessGroup) -> torch.Tensor:
        rank = dist.get_rank(group)
        ctx.own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        buffer = mine.new_zeros((max(counts), *mine.shape[1:]))
        buffer[: mine.shape[0]] = mine
        parts = [torch.empty_like(buffer) for _ in counts]
        dist.all_gather(parts, buffer, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient[ctx.own], None, None


@dataclass(frozen=True, slots=True)
class MicroBatchRun:
    """The `Run` of a micro-batch whose layers are done. output: what the head gets of this part's labels, [m, H]; of
    scalar models the values [T/c]. head: [n, H] -> logits [n, V]; limit: logits that exist at once at most; group: of
    context parallelism, None without; teach: the same of a teacher, its rows [m, H] and its head."""

    batch: MicroBatch
    output: torch.Tensor
    head: Callable[[torch.Tensor], torch.Tensor]
    limit: int
    counts: tuple[int, ...]
    group: ProcessGroup | None
    vocabulary: int
    teach: Callable[[], tuple[torch.Tensor, Rows]] | None = None

    def tokens(self, temperature: float, *, entropy_learns: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities float32[M] of the labels, with gradient where enabled, and entropies float32[M], with
        gradient where `entropy_learns`."""
        labels = self.batch.labels
        if self.group is not None:
            before = sum(self.counts[: dist.get_rank(self.group)])
            labels = labels[before : before + self.output.shape[0]]

        def of(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            distribution = torch.log_softmax(scores / temperature, dim=-1)
            return distribution.gather(-1, labels[:, None])[:, 0], entropies(distribution, learn=entropy_learns)

        logprobs, entropy = self._pieces(of, labels)
        return logprobs, entropy if entropy_learns else entropy.detach()

    def comparison(self, temperature: float, of: LogprobComparison) -> tuple[torch.Tensor, torch.Tensor]:
        """float32[M] that `of` makes of this model's and the teacher's log-probabilities float32[n, V], a few tokens at
        a time; entropies float32[M] of this model."""
        if self.teach is None:
            raise BadConfiguration("no teacher; hold one beside the policy first")
        hidden, score = self.teach()

        def compare(scores: torch.Tensor, their: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            distribution = torch.log_softmax(scores / temperature, dim=-1)
            with torch.no_grad():
                target = torch.log_softmax(score(their).float() / temperature, dim=-1)
            return of(distribution, target), entropies(distribution)

        gaps, entropy = self._pieces(compare, hidden)
        return gaps, entropy.detach()

    def _pieces(self, of: Of, beside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `of` makes of the logits [n, V] and the rows of `beside` [m, ...]: float32[M] twice. A piece keeps its
        hidden rows alone; backward computes its logits again."""

        def piece(rows: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return of(self.head(rows).float(), labels)

        count = max(1, self.limit // self.vocabulary)
        if self.output.shape[0] <= count:
            first, second = piece(self.output, beside)
            return self._join_parts(first), self._join_parts(second)
        pairs = zip(self.output.split(count), beside.split(count), strict=True)
        parts = [checkpoint(piece, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]
        first, second = (torch.cat(column) for column in zip(*parts, strict=True))
        return self._join_parts(first), self._join_parts(second)

    def values(self) -> torch.Tensor:
        """float32[T]."""
        values = self.output.float()
        if self.group is not None:
            lengths = (values.shape[0],) * len(self.counts)
            values = _join(values, lengths, self.group)
        return values[: self.batch.tokens.shape[1]]

    def _join_parts(self, piece: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return piece
        return _join(piece, self.counts, self.group)


def _join(piece: torch.Tensor, counts: tuple[int, ...], group: ProcessGroup) -> torch.Tensor:
    apply: Any = _Parts.apply
    out: torch.Tensor = apply(piece, counts, group)
    return out
