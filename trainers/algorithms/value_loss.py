"""The critic's loss.

    L_t = max( e(v_t - R_t), e(clip(v_t, V_t - c, V_t + c) - R_t) )       e(x) = x^2 / 2, or Huber's
    loss = sum_t L_t keep_t / N

PPO's code clips so, beyond its paper: https://arxiv.org/abs/2005.12729, section 3.

V is what the critic said before the step, R = A + V. The clip keeps one batch from moving a value far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from millrace.trainers.algorithms.aggregation import token_sum
from millrace.trainers.algorithms.base import Algorithm, Run, Scores, Sums, Weights
from millrace.trainers.algorithms.knobs import Knobs
from millrace.trainers.algorithms.normalisation import Reduce, alone
from millrace.trainers.batches.packing import RETURNS, VALUES
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None, huber: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """float[M] each -> losses [M] and whether the clip won, bool[M]."""
    raw = _error(values - returns, huber)
    if clip is None:
        return raw, torch.zeros_like(raw, dtype=torch.bool)
    near = old_values + (values - old_values).clamp(-clip, clip)
    clip_loss = _error(near - returns, huber)
    return torch.maximum(raw, clip_loss), raw < clip_loss


def _error(gap: torch.Tensor, huber: float | None) -> torch.Tensor:
    if huber is None:
        return 0.5 * gap**2
    size = gap.abs()
    return torch.where(size <= huber, 0.5 * gap**2, huber * (size - 0.5 * huber))


@dataclass(frozen=True)
class ValueLoss(Algorithm):
    """What the critic learns beside a policy of these knobs, from the columns that the policy's weighing attached."""

    name = "critic"
    measures = ("kept", "value_clipped", "value_error")

    knobs: Knobs

    @property
    def minibatches(self) -> int:
        return self.knobs.minibatches

    def weigh(
        self, samples: Sequence[Sample], oldest: int | None, scores: Scores | None = None, reduce: Reduce = alone
    ) -> Weights:
        raise BadConfiguration("a critic learns from what its policy's weighing attached; weigh with the policy")

    def evaluate(self, run: Run) -> tuple[torch.Tensor, Sums]:
        batch, k = run.batch, self.knobs
        values, returns = run.values()[batch.at], batch.column(RETURNS)
        losses, is_clipped = clipped_value_loss(values, batch.column(VALUES), returns, k.value_clip, k.value_huber)
        loss = token_sum(losses, batch.keep)
        with torch.no_grad():
            sums = {
                "kept": batch.keep.sum(),
                "value_clipped": token_sum(is_clipped.float(), batch.keep),
                "value_error": token_sum((values - returns).abs(), batch.keep),
            }
        return loss, sums
