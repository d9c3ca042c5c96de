"""What a trajectory earned, before it is shaped.

    s   mean over the trajectory's lineages of what a reward model says at their last token
    r   recorded_coef * recorded + reward_model_coef * s

A part that counts and is missing, or is no number, leaves the trajectory without a reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from millrace.trainers.batches.packing import Floats
from millrace.trainers.batches.sample import Sample

RewardTable: TypeAlias = dict[tuple[str, str], float]
"""(group, trajectory) -> reward, of those that have one."""


def recorded_rewards(samples: Sequence[Sample]) -> RewardTable:
    """The rewards that came with the samples."""
    return {(s.group, s.trajectory): s.reward for s in reversed(samples) if s.reward is not None}


def model_scores(samples: Sequence[Sample], scores: Mapping[Sample, Floats]) -> RewardTable:
    """scores: float32[1] of each sample, float32[0] of one that nobody scored, since no token of it trains."""
    marks: dict[tuple[str, str], list[float]] = {}
    for sample in sorted(samples, key=lambda s: s.lineage):
        marks.setdefault((sample.group, sample.trajectory), []).extend(scores[sample].tolist())
    means = {key: math.fsum(row) / len(row) for key, row in marks.items() if row}
    return {key: mean for key, mean in means.items() if math.isfinite(mean)}


def mix_rewards(
    samples: Sequence[Sample], scores: Mapping[Sample, Floats], *, recorded_coef: float, reward_model_coef: float
) -> RewardTable:
    """Recorded rewards and a reward model's scores, weighed."""
    marks = model_scores(samples, scores)
    if recorded_coef == 0:
        return {key: reward_model_coef * mark for key, mark in marks.items()}
    rewards = recorded_rewards(samples)
    return {
        key: recorded_coef * rewards[key] + reward_model_coef * mark for key, mark in marks.items() if key in rewards
    }
