"""Preferences without a reward model.

    h_y     = log pi(y) - log ref(y)            sums over the reply's tokens, in float64
    Delta   = h_chosen - h_rejected
    sigmoid   loss = - log sigmoid(beta Delta)              DPO
    ipo       loss = (Delta' - 1 / (2 beta))^2              Delta' from means over tokens instead of sums

DPO https://arxiv.org/abs/2305.18290, equation 7; IPO https://arxiv.org/abs/2310.12036.

The mean is over pairs. The implicit reward of a reply is beta h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from millrace.trainers.algorithms.base import Scores, Sums, Weights
from millrace.trainers.algorithms.normalisation import Reduce, alone
from millrace.trainers.algorithms.pairs import PairAlgorithm, complete, side_sums
from millrace.trainers.batches.packing import REFERENCE, SIDE, MicroBatch
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration


@dataclass(frozen=True)
class Dpo(PairAlgorithm):
    """Learns to prefer the reply of each pair that has the higher reward."""

    name = "dpo"

    minibatches: int = 1  # optimizer steps that a batch is cut into
    beta: float = 0.1  # how strongly the policy is held to the reference
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"  # what becomes of the gap between the two replies

    def __post_init__(self) -> None:
        if self.beta <= 0 or self.minibatches < 1:
            raise BadConfiguration("beta and minibatches must be above 0")
        if self.loss_type not in ("sigmoid", "ipo"):
            raise BadConfiguration(f"loss_type {self.loss_type!r}: choose sigmoid or ipo")

    @property
    def needs(self) -> tuple[str, ...]:
        return (REFERENCE,)

    def weigh(
        self, samples: Sequence[Sample], oldest: int | None, scores: Scores | None = None, reduce: Reduce = alone
    ) -> Weights:
        weights = super().weigh(samples, oldest)
        if scores is None or REFERENCE not in scores:
            raise BadConfiguration("preferences are learned against a reference; score the batch with it first")
        for sample, columns in weights.items():
            columns[REFERENCE] = scores[REFERENCE][sample]
        return weights

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        pairs = complete(batch)
        gap = torch.where(batch.column(SIDE) != 0, logprobs - batch.column(REFERENCE), 0.0)
        chosen, rejected = side_sums(gap, batch, mean=self.loss_type == "ipo")
        if self.loss_type == "ipo":
            losses = (chosen - rejected - 1 / (2 * self.beta)) ** 2
        else:
            losses = -F.logsigmoid(self.beta * (chosen - rejected))
        return losses[pairs].sum(), self.sums((self.beta * chosen, self.beta * rejected), pairs)
