"""Advantages from rewards.

    A_i = (r_i - mean(r)) / (std(r) + eps)         over the trajectories of a group, std unbiased, eps = 1e-4

An advantage belongs to a trajectory and is shared by all its lineages. A group of one has nothing to compare: A = 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from trainers.batches.sample import Sample

EPS = 1e-4


def normalise(rewards: Sequence[float], eps: float = EPS) -> list[float]:
    """The advantages of one group, in float64; all zero for fewer than two rewards or equal ones."""
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    values = np.asarray(rewards, np.float64)
    centred = values - values.mean()
    return [float(a) for a in centred / (values.std(ddof=1) + eps)]


def rewards_by_group(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """group -> trajectory -> reward; trajectories without a reward are left out. Sorted, so the input order is
    forgotten."""
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for sample in sorted(samples, key=lambda s: (s.group, s.trajectory)):
        if sample.reward is not None:
            groups[sample.group][sample.trajectory] = sample.reward
    return dict(groups)


def group_advantages(groups: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """trajectory -> advantage."""
    return {
        trajectory: advantage
        for rewards in groups.values()
        for trajectory, advantage in zip(rewards, normalise(list(rewards.values())), strict=True)
    }
