"""Preferences without a reference: the mean log-probability of a reply is its reward.

    h_y     = mean over the tokens of y of log pi_t
    loss    = - log sigmoid(beta (h_chosen - h_rejected) - gamma)          mean over pairs

SimPO https://arxiv.org/abs/2405.14734, equation 6. There gamma is about half of beta, and beta 2 to 10.

The implicit reward of a reply is beta h; gamma is the margin by which that of the chosen one shall be the higher.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from millrace.trainers.algorithms.base import Sums
from millrace.trainers.algorithms.pairs import PairAlgorithm, complete, side_sums
from millrace.trainers.batches.packing import MicroBatch
from millrace.trainers.errors import BadConfiguration


@dataclass(frozen=True)
class Simpo(PairAlgorithm):
    """Learns to find the reply of each pair that has the higher reward likelier, token for token."""

    name = "simpo"

    minibatches: int = 1  # optimizer steps that a batch is cut into
    beta: float = 2.0  # what a nat of mean log-probability is worth
    gamma: float = 1.0  # margin of reward that the chosen reply shall have

    def __post_init__(self) -> None:
        if self.beta <= 0 or self.minibatches < 1 or self.gamma < 0:
            raise BadConfiguration("beta and minibatches must be above 0, gamma 0 or more")

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        pairs = complete(batch)
        chosen, rejected = (self.beta * mean for mean in side_sums(logprobs, batch, mean=True))
        losses = -F.logsigmoid(chosen - rejected - self.gamma)
        return losses[pairs].sum(), self.sums((chosen, rejected), pairs)
