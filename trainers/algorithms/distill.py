"""Distillation from a teacher, on the tokens that samples mark trainable.

    forward     KL(p_teacher || p_theta) = sum_v p_T,v (log p_T,v - log p_v)     covers what the teacher may say
    reverse     KL(p_theta || p_teacher) = sum_v p_v (log p_v - log p_T,v)       seeks what the teacher would say

Both over the whole vocabulary, whoever drew the tokens. On-policy distillation is for samples that the student drew,
and needs the teacher's log-probability of the drawn token alone; it is a term of the policy-gradient family's loss:

    rl_coef * L_RL  +  teacher_coef * mean_t exp(logp_t - old_t) (stopgrad(logp_t) - logp_T,t)

https://arxiv.org/abs/1503.02531 (forward), https://arxiv.org/abs/2306.08543 (reverse), https://arxiv.org/abs/2306.13649
(on-policy).

That is the policy gradient whose reward is log p_T - log p. Where logp = old its value is mean_t (logp_t - logp_T,t),
the sampled reverse KL. The gradient of that mean itself would not see the teacher at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch

from millrace.trainers.algorithms.aggregation import token_sum
from millrace.trainers.algorithms.base import Algorithm, Run, Scores, Sums, Weights
from millrace.trainers.algorithms.masks import fresh
from millrace.trainers.algorithms.normalisation import Reduce, alone
from millrace.trainers.batches.packing import KEEP, TEACHER
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration


def towards(teacher: torch.Tensor, logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """float[M] each, of the drawn tokens -> the loss that pulls them to the teacher, float[M]."""
    return torch.exp(logprobs - old_logprobs) * (logprobs.detach() - teacher)


def divergence(student: torch.Tensor, teacher: torch.Tensor, direction: str) -> torch.Tensor:
    """log-probabilities float[M, V] -> float[M]."""
    if direction == "forward":
        return (teacher.exp() * (teacher - student)).sum(-1)
    return (student.exp() * (student - teacher)).sum(-1)


@dataclass(frozen=True)
class Distill(Algorithm):
    """Learns a teacher's distributions."""

    name = "distill"
    measures = ("kept", "entropy")

    minibatches: int = 1  # optimizer steps that a batch is cut into
    temperature: float = 1.0  # divides the logits of both models
    direction: Literal["forward", "reverse"] = "forward"  # which of the two KLs

    def __post_init__(self) -> None:
        if self.direction not in ("forward", "reverse"):
            raise BadConfiguration(f"direction {self.direction!r}: choose forward or reverse")
        if self.minibatches < 1 or self.temperature <= 0:
            raise BadConfiguration("minibatches and temperature must be above 0")

    @property
    def holds(self) -> tuple[str, ...]:
        return (TEACHER,)

    def weigh(
        self, samples: Sequence[Sample], oldest: int | None, scores: Scores | None = None, reduce: Reduce = alone
    ) -> Weights:
        return {sample: {KEEP: fresh(sample, oldest).astype(np.float32)} for sample in samples}

    def evaluate(self, run: Run) -> tuple[torch.Tensor, Sums]:
        keep = run.batch.keep
        gaps, entropy = run.comparison(self.temperature, partial(divergence, direction=self.direction))
        return token_sum(gaps, keep), {"kept": keep.sum(), "entropy": token_sum(entropy, keep)}
