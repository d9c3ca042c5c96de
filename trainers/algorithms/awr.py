"""Advantage-weighted regression: imitates each reply by how much better it was than its group.

    A_i   = r_i - mean_G r                       the group's mean stands for the value of the prompt
    w_i   = min(exp(A_i / beta), weight_clip)    at every token of sample i alike
    loss  = - sum_t w_t logp_t keep_t / N

Peng et al. 2019, https://arxiv.org/abs/1910.00177, equation 2 and algorithm 1; the bound on weights is theirs too. No
ratio to the policy that sampled is taken, so replies may be of any age. A trajectory without a reward, or without a
token that may pull, takes no part, neither in means nor with its tokens, which N still counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from millrace.trainers.algorithms.aggregation import token_sum
from millrace.trainers.algorithms.base import Scores, Sums, TokenAlgorithm, Weights
from millrace.trainers.algorithms.masks import fresh
from millrace.trainers.algorithms.normalisation import Reduce, alone
from millrace.trainers.algorithms.rewards import RewardTable, recorded_rewards
from millrace.trainers.batches.packing import KEEP, MicroBatch
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration

WEIGHT = "weight"


@dataclass(frozen=True)
class Awr(TokenAlgorithm):
    """Learns to say what the better samples of each group say."""

    name = "awr"
    measures = ("kept", "entropy", "weight", "clipped")

    minibatches: int = 1  # optimizer steps that a batch is cut into
    beta: float = 0.2  # temperature of the weights: the lower, the more the best reply of a group counts alone
    weight_clip: float = 20.0  # the most that a reply may count

    def __post_init__(self) -> None:
        if self.minibatches < 1 or not all(0 < value < math.inf for value in (self.beta, self.weight_clip)):
            raise BadConfiguration("beta, weight_clip and minibatches must be above 0, and finite")

    def weigh(
        self, samples: Sequence[Sample], oldest: int | None, scores: Scores | None = None, reduce: Reduce = alone
    ) -> Weights:
        counts = {(s.group, s.trajectory) for s in samples if fresh(s, oldest).any()}
        rewards = recorded_rewards(samples)
        weights = self._weights({key: reward for key, reward in rewards.items() if key in counts})
        out: Weights = {}
        for sample in samples:
            weight = weights.get((sample.group, sample.trajectory))
            keep = (fresh(sample, oldest) & (weight is not None)).astype(np.float32)
            out[sample] = {KEEP: keep, WEIGHT: np.full(len(keep), weight or 0.0, np.float32)}
        return out

    def _weights(self, by_trajectory: RewardTable) -> RewardTable:
        """w by group and trajectory, from the rewards."""
        groups: dict[str, list[float]] = {}
        for (group, _), reward in by_trajectory.items():
            groups.setdefault(group, []).append(reward)
        means = {group: math.fsum(rewards) / len(rewards) for group, rewards in groups.items()}
        most = math.log(self.weight_clip)  # before the exponential, which then cannot overflow
        return {
            (group, name): math.exp(min((reward - means[group]) / self.beta, most))
            for (group, name), reward in by_trajectory.items()
        }

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        weight = batch.column(WEIGHT)
        is_clipped = weight >= self.weight_clip * (1 - 1e-6)
        sums = {
            "kept": batch.keep.sum(),
            "entropy": token_sum(entropy, batch.keep),
            "weight": token_sum(weight, batch.keep),
            "clipped": token_sum(is_clipped.float(), batch.keep),
        }
        return token_sum(-weight * logprobs, batch.keep), sums
