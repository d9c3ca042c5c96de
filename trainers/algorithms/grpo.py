"""GRPO: group-relative advantages and a clipped surrogate, token mean.

    A   = (r - mean_group r) / (std_group r + 1e-4)                           `advantages.py`
    L_t = clipped surrogate of logp_t against the policy that sampled t       `policy_loss.py`
    loss = sum_t L_t keep_t / N                                               `aggregation.py`

Decoupled (for stale batches): the clip is around the recomputed proximal policy, and the behaviour weight
min(prox/behav, cap) multiplies the loss. No KL term and no critic. A trajectory without a reward takes no part: neither
in its group's statistics nor with its tokens, which N still counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from trainers.algorithms.advantages import group_advantages, rewards_by_group
from trainers.algorithms.aggregation import token_sum
from trainers.algorithms.base import Algorithm, Sums
from trainers.algorithms.masks import fresh
from trainers.algorithms.policy_loss import behaviour_weight, clipped_surrogate
from trainers.batches.packing import Packed, Weighted
from trainers.batches.sample import Sample
from trainers.errors import BadConfiguration


@dataclass(frozen=True)
class Grpo(Algorithm):
    """clip_low and clip_high bound the ratio to [1 - low, 1 + high]; behaviour_cap is used when decoupled."""

    name: ClassVar[str] = "grpo"
    measures: ClassVar[tuple[str, ...]] = ("kept", "clipped", "ratio", "kl", "entropy", "behaviour_weight")

    minibatches: int = 2
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    decoupled: bool = False
    behaviour_cap: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low < 1 or self.clip_high < 0:
            raise BadConfiguration(
                f"clip_low {self.clip_low} must be in [0, 1) and clip_high {self.clip_high} at least 0"
            )
        if self.minibatches < 1 or self.temperature <= 0 or self.behaviour_cap <= 0:
            raise BadConfiguration("minibatches, temperature and behaviour_cap must be above 0")

    def needs_proximal(self) -> bool:
        return self.decoupled

    def weigh(self, samples: Sequence[Sample], oldest: int | None) -> list[Weighted]:
        advantages = group_advantages(rewards_by_group(samples))
        weighted = []
        for sample in samples:
            keep = fresh(sample, oldest)
            advantage = advantages.get(sample.trajectory)
            weighted.append(Weighted(sample, advantage or 0.0, keep if advantage is not None else keep * 0))
        return weighted

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, batch: Packed) -> tuple[torch.Tensor, Sums]:
        old, weight = batch.behaviour, torch.ones_like(batch.behaviour)
        if self.decoupled:
            if batch.proximal is None:
                raise BadConfiguration(
                    "decoupled GRPO needs the proximal policy's log-probabilities; score the batch first"
                )
            old, weight = batch.proximal, behaviour_weight(batch.proximal, batch.behaviour, self.behaviour_cap)
        surrogate, clipped = clipped_surrogate(logprobs, old, batch.advantages, self.clip_low, self.clip_high)
        loss = token_sum(weight * surrogate, batch.keep)
        with torch.no_grad():
            gap = logprobs.detach() - batch.behaviour
            sums = {
                "kept": batch.keep.sum(),
                "clipped": token_sum(clipped.float(), batch.keep),
                "ratio": token_sum(torch.exp(logprobs.detach() - old), batch.keep),
                "kl": token_sum(torch.exp(gap) - 1 - gap, batch.keep),
                "entropy": token_sum(entropy, batch.keep),
                "behaviour_weight": token_sum(weight, batch.keep),
            }
        return loss, sums
