"""Imitation of the chosen reply and a preference for it in one, without a reference.

    h_y     = mean over the tokens of y of log pi_t
    odds_y  = exp(h_y) / (1 - exp(h_y))
    loss    = - h_chosen - beta log sigmoid(log odds_chosen - log odds_rejected)          mean over pairs

ORPO https://arxiv.org/abs/2403.07691, equations 3 to 7; beta is lambda there.

The odds ratio pushes less where the rejected reply is unlikely already, so it may stand beside imitation all the time.
The implicit reward of a reply is beta h.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from millrace.trainers.algorithms.base import Sums
from millrace.trainers.algorithms.pairs import PairAlgorithm, complete, side_sums
from millrace.trainers.batches.packing import MicroBatch
from millrace.trainers.errors import BadConfiguration

SURE = -1e-7
"""The largest mean log-probability that has odds; beyond it a reply pulls as a sure one does: not at all."""


def log_odds(h: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) of p = exp(h), float64."""
    h = h.clamp(max=SURE)
    return h - torch.log(-torch.expm1(h))


@dataclass(frozen=True)
class Orpo(PairAlgorithm):
    """Learns to say the reply of each pair that has the higher reward, and not the other."""

    name = "orpo"

    minibatches: int = 1  # optimizer steps that a batch is cut into
    beta: float = 0.1  # weight of the preference beside imitation

    def __post_init__(self) -> None:
        if self.beta <= 0 or self.minibatches < 1:
            raise BadConfiguration("beta and minibatches must be above 0")

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        pairs = complete(batch)
        chosen, rejected = side_sums(logprobs, batch, mean=True)
        ratio = log_odds(chosen) - log_odds(rejected)
        losses = -chosen - self.beta * F.logsigmoid(ratio)
        return losses[pairs].sum(), self.sums((self.beta * chosen, self.beta * rejected), pairs)
