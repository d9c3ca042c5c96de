"""Replies that are each good or bad, without a partner.

    h_y     = log pi(y) - log ref(y)                                     sum over the reply's tokens, in float64
    z       = max(0, mean of h over replies to other prompts)            KL(pi || ref), no gradient flows through it
    loss    = lambda_D (1 - sigmoid(beta (h_y - z)))                     of a desirable reply
              lambda_U (1 - sigmoid(beta (z - h_y)))                     of an undesirable one; mean over replies

KTO https://arxiv.org/abs/2402.01306, equations 7 and 8.

A reply is a lineage; it is desirable if its reward is above `threshold`. The paper estimates z from the batch, each
prompt with the reply to another one: `mismatches` makes such samples. They have no reward, train nothing and no
denominator counts them; neither does it count a reply whose reward is missing, of which z knows nothing either. z is
taken over all ranks with the weights that a batch starts from, so it does not depend on how the batch is cut; without
mismatches it is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from millrace.trainers.algorithms.aggregation import sample_sums
from millrace.trainers.algorithms.base import Scores, Sums, TokenAlgorithm, Weights
from millrace.trainers.algorithms.masks import fresh
from millrace.trainers.algorithms.normalisation import Reduce, alone
from millrace.trainers.batches.packing import KEEP, PROXIMAL, REFERENCE, SIDE, MicroBatch
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration

BASELINE = "baseline"
"""Column: z, at every token alike."""


def mismatches(samples: Sequence[Sample], longest: int) -> list[Sample]:
    """Each sample's prompt with the reply of the next one, of at most `longest` tokens; nothing of a single one."""
    if len(samples) < 2:
        return []
    made = []
    for sample, other in zip(samples, [*samples[1:], samples[0]], strict=True):
        begin, end = int(np.argmax(sample.mask)), int(np.argmax(other.mask))
        joined = {
            name: np.concatenate([getattr(sample, name)[:begin], getattr(other, name)[end:]])[:longest]
            for name in ("tokens", "mask", "logprobs", "versions")
        }
        name = f"{sample.trajectory}/{other.trajectory}"
        made.append(replace(sample, **joined, reward=None, trajectory=name, is_mismatch=True))
    return made


@dataclass(frozen=True)
class Kto(TokenAlgorithm):
    """Learns to say what is good and not what is bad, each against a frozen reference."""

    name = "kto"
    measures = ("kept", "reward_accuracy", "reward_margin", "reference_kl")

    minibatches: int = 1  # optimizer steps that a batch is cut into
    beta: float = 0.1  # how strongly the policy is held to the reference
    threshold: float = 0.5  # replies with a reward above it are desirable, the others are not
    desirable_weight: float = 1.0  # lambda_D: what a desirable reply counts
    undesirable_weight: float = 1.0  # lambda_U: what an undesirable reply counts

    def __post_init__(self) -> None:
        if self.beta <= 0 or self.minibatches < 1 or min(self.desirable_weight, self.undesirable_weight) < 0:
            raise BadConfiguration("beta and minibatches must be above 0, the weights of replies 0 or more")

    @property
    def needs(self) -> tuple[str, ...]:
        return (PROXIMAL, REFERENCE)

    def weigh(
        self, samples: Sequence[Sample], oldest: int | None, scores: Scores | None = None, reduce: Reduce = alone
    ) -> Weights:
        if scores is None or not {*self.needs} <= scores.keys():
            raise BadConfiguration("kto compares with a reference; score the batch by it and by the policy first")
        out: Weights = {}
        gaps = []
        for sample in samples:
            side = 0.0 if sample.reward is None else 1.0 if sample.reward > self.threshold else -1.0
            keep = fresh(sample, oldest).astype(np.float32) * (side != 0)
            out[sample] = {KEEP: keep, SIDE: keep * np.float32(side), REFERENCE: scores[REFERENCE][sample]}
            if sample.is_mismatch and sample.trainable:
                gaps.append(float((scores[PROXIMAL][sample] - scores[REFERENCE][sample]).astype(np.float64).sum()))
        total, count = reduce([math.fsum(gaps), float(len(gaps))])
        baseline = max(0.0, total / count) if count else 0.0
        for columns in out.values():
            columns[BASELINE] = np.full(len(columns[KEEP]), baseline, np.float32)
        return out

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        gap = torch.where(batch.keep > 0, logprobs - batch.column(REFERENCE), 0.0)
        h = sample_sums(gap.double(), batch)
        sizes = sample_sums(batch.keep.double(), batch).clamp(min=1)
        side = torch.sign(sample_sums(batch.column(SIDE).double(), batch))
        z = sample_sums(batch.column(BASELINE).double() * batch.keep, batch) / sizes
        margin = side * self.beta * (h - z)
        weight = torch.where(side > 0, self.desirable_weight, self.undesirable_weight) * side.abs()
        sums = {
            "kept": side.abs().sum(),
            "reward_accuracy": (margin.detach() > 0).sum(),
            "reward_margin": margin.detach().sum(),
            "reference_kl": (z * side.abs()).sum(),
        }
        return (weight * torch.sigmoid(-margin)).sum(), sums

    def count(self, batch: MicroBatch) -> float:
        return float((sample_sums(batch.keep, batch) > 0).sum())
