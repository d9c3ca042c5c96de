"""The forward pass of a packed micro-batch.

logp_t = log softmax(logits_{t-1} / temperature)[token_t]          in fp32, for trainable tokens alone
H_t    = - sum_v p_v log p_v                                       of the same distribution, without gradient
v_t    = the value head after token t                              of value models, for every token
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from millrace.trainers.backends.models.head import (
    LOGITS,
    Of,
    Rows,
    as_they_are,
    hidden_rows,
    in_pieces,
    is_plain,
    rows_at_once,
)
from millrace.trainers.backends.models.label_logprobs import label_logprobs
from millrace.trainers.backends.models.rows import has_rows, run_rows
from millrace.trainers.batches.kernels import stretches
from millrace.trainers.batches.packing import MicroBatch
from millrace.trainers.errors import BadConfiguration

LogprobComparison = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Log-probabilities float32[n, V] of two models -> float32[n]."""


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """The `Run` of a model and a micro-batch. extra: more arguments of the models' forward; fed, teacher_fed: those of
    one of them alone."""

    model: torch.nn.Module
    batch: MicroBatch
    teacher_model: torch.nn.Module | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    logits: int = LOGITS
    """how many exist at once"""
    fusion: bool = False
    """whether formulas over logits are compiled"""
    fed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    teacher_fed: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def tokens(self, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities float32[M] of the labels, with gradient where enabled, and entropies float32[M]."""
        return token_logprobs(self.model, self.batch, temperature, self.logits, self.fusion, **self._arguments)

    def comparison(self, temperature: float, of: LogprobComparison) -> tuple[torch.Tensor, torch.Tensor]:
        """float32[M] that `of` makes of this model's and the teacher's log-probabilities float32[n, V], a few tokens
        at a time; entropies float32[M] of this model."""
        if self.teacher_model is None:
            raise BadConfiguration("no teacher; hold one beside the policy first")
        models = self.model, self.teacher_model
        arguments = self._arguments, {**self.extra, **self.teacher_fed}
        return token_comparison(models, arguments, self.batch, temperature, of, self.logits)

    def hidden(self) -> torch.Tensor:
        """What a pipeline stage before the last passes on, [1, T, H]."""
        return run(self.model, self.batch, **self._arguments)

    def values(self) -> torch.Tensor:
        """float32[T]."""
        values: torch.Tensor = run(self.model, self.batch, **self._arguments)[0, :, 0].float()
        return values

    @property
    def _arguments(self) -> dict[str, Any]:
        return {**self.extra, **self.fed}


def token_logprobs(
    model: torch.nn.Module,
    batch: MicroBatch,
    temperature: float,
    logits: int = LOGITS,
    fusion: bool = False,
    **extra: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities float32[M] of the labels, with gradient where enabled, and entropies float32[M]. At most
    `logits` logits exist at once; those of a head in a narrow format exist once, if so many may (`label_logprobs`)."""

    def of(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distribution = torch.log_softmax(scores / temperature, dim=-1)
        return distribution.gather(-1, labels[:, None])[:, 0], _entropy(distribution)

    def whole(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if scores.dtype == torch.float32 or not is_plain(model):
            return of(scores.float(), labels)
        return label_logprobs(scores, labels, temperature, fusion=fusion)

    return _pieces(model, batch, of, whole, batch.labels, logits, extra)


def token_comparison(
    models: tuple[torch.nn.Module, torch.nn.Module],
    arguments: tuple[Mapping[str, Any], Mapping[str, Any]],
    batch: MicroBatch,
    temperature: float,
    compare: LogprobComparison,
    logits: int = LOGITS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32[M] that `compare` makes of the log-probabilities of two models, of which the second is a teacher, and
    entropies float32[M] of the first. arguments: more arguments of each one's forward."""
    (model, teacher), (extra, theirs_too) = models, arguments
    with torch.no_grad():
        rows = rows_at_once(teacher, logits)
        if rows is None:
            score: Rows = as_they_are
            teacher_rows = run(teacher, batch, logits_to_keep=batch.at, **theirs_too)[0]
        else:
            teacher_rows, score = hidden_rows(
                teacher, lambda: run(teacher, batch, logits_to_keep=batch.at, **theirs_too)[0]
            )

    def of(scores: torch.Tensor, their: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distribution = torch.log_softmax(scores / temperature, dim=-1)
        with torch.no_grad():
            target = torch.log_softmax(score(their) / temperature, dim=-1)
        return compare(distribution, target), _entropy(distribution)

    def whole(scores: torch.Tensor, their: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return of(scores.float(), their)

    return _pieces(model, batch, of, whole, teacher_rows, logits, extra)


def _entropy(distribution: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return -(distribution.exp() * distribution).sum(-1)


def _pieces(
    model: torch.nn.Module,
    batch: MicroBatch,
    of: Of,
    whole: Of,
    beside: torch.Tensor,
    logits: int,
    extra: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `of` makes of the logits float32[n, V] and the rows of `beside` [M, ...], `whole` of all of them as the head
    made them: float32[M] twice, the second without gradient."""
    rows = rows_at_once(model, logits)
    if rows is None or batch.trainable <= rows:
        return whole(run(model, batch, logits_to_keep=batch.at, **extra)[0], beside)
    with in_pieces(model, rows, of, beside):
        columns = run(model, batch, logits_to_keep=batch.at, **extra)[0]
    return columns[:, 0], columns[:, 1].detach()


def run(
    model: torch.nn.Module, batch: MicroBatch, logits_to_keep: torch.Tensor | None = None, **more: Any
) -> torch.Tensor:
    """[1, M, V] at the places `logits_to_keep` int64[M] of the row, or [1, T, V]."""
    if has_rows(model):
        return run_rows(model, batch, logits_to_keep)
    if logits_to_keep is not None:
        more["logits_to_keep"] = logits_to_keep
    if "inputs_embeds" not in more:
        more["input_ids"] = batch.tokens
    logits: torch.Tensor = model(
        position_ids=batch.positions,
        attention_mask=batch.tokens.new_zeros((1, 1, 1, 1)),  # 4-D: transformers builds no mask of its own
        use_cache=False,
        runs=batch.runs,
        paths=batch.paths,
        where=stretches(batch.runs, batch.paths, batch.tokens.device) if batch.tokens.is_cuda else None,
        **more,
    ).logits
    return logits
