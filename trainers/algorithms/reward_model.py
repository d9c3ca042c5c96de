"""A reward model from preferences (Bradley-Terry).

    s_y   = what the value head says at the last token of y
    loss  = - log sigmoid(s_chosen - s_rejected)              mean over pairs

https://arxiv.org/abs/2203.02155, equation 1.

The trained model has a scalar head instead of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from millrace.trainers.algorithms.aggregation import sample_sums
from millrace.trainers.algorithms.base import Algorithm, Run, Scores, Sums, Weights
from millrace.trainers.algorithms.normalisation import Reduce, alone
from millrace.trainers.algorithms.pairs import complete, pair_weights
from millrace.trainers.batches.packing import SIDE, MicroBatch
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration


@dataclass(frozen=True)
class RewardModel(Algorithm):
    """Learns to score the chosen reply of each pair above the other."""

    name = "reward-model"
    measures = ("kept", "correct", "chosen_score", "rejected_score")
    whole = True

    minibatches: int = 1  # optimizer steps that a batch is cut into

    def __post_init__(self) -> None:
        if self.minibatches < 1:
            raise BadConfiguration("minibatches must be above 0")

    def weigh(
        self, samples: Sequence[Sample], oldest: int | None, scores: Scores | None = None, reduce: Reduce = alone
    ) -> Weights:
        return pair_weights(samples, oldest)

    def evaluate(self, run: Run) -> tuple[torch.Tensor, Sums]:
        return bradley_terry(run.values()[run.batch.ends], run.batch)

    def count(self, batch: MicroBatch) -> float:
        return float(complete(batch).sum())


def bradley_terry(scores: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
    """float32[S] scores of the samples -> summed loss over the pairs, and sums. A trajectory of several lineages
    scores as their mean."""
    pairs = complete(batch)
    side = torch.sign(sample_sums(batch.column(SIDE), batch))
    means = []
    for sign in (1, -1):
        here = (side == sign).to(torch.float64)
        counts = here.new_zeros(len(pairs)).index_add(0, batch.groups, here)
        total = here.new_zeros(len(pairs)).index_add(0, batch.groups, here * scores.double())
        means.append(total / counts.clamp(min=1))
    chosen, rejected = means
    loss = -F.logsigmoid(chosen - rejected)[pairs].sum()
    with torch.no_grad():
        return loss, {
            "kept": pairs.sum(),
            "correct": (chosen > rejected)[pairs].sum(),
            "chosen_score": chosen[pairs].sum(),
            "rejected_score": rejected[pairs].sum(),
        }
