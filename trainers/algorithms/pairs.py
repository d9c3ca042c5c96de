"""Pairs of replies to one prompt: a group of which two trajectories differ in reward; the higher one was chosen.

A pair is written as a sign on each token, +1 chosen, -1 rejected, 0 none, so that a difference between the two is one
sum and nothing depends on how samples lie in memory:

    Delta = sum_t side_t x_t        over the group

Invariants: a pair is never split over micro-batches (`Algorithm.whole`); a pair of which one side has no token that may
pull is no pair, and no denominator counts it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from millrace.trainers.algorithms.base import Scores, TokenAlgorithm, Weights
from millrace.trainers.algorithms.masks import fresh
from millrace.trainers.algorithms.normalisation import Reduce, alone
from millrace.trainers.batches.packing import KEEP, SIDE, MicroBatch
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration


def pair_weights(samples: Sequence[Sample], oldest: int | None) -> Weights:
    """keep and side of every sample. A group without two rewards that differ is no pair; one with more than two
    trajectories is refused."""
    groups: dict[str, dict[str, list[Sample]]] = {}
    for sample in samples:
        groups.setdefault(sample.group, {}).setdefault(sample.trajectory, []).append(sample)
    out: Weights = {}
    for group, trajectories in groups.items():
        if len(trajectories) > 2:
            raise BadConfiguration(
                f"group {group} has {len(trajectories)} trajectories; a pair is two: give each pair a group of its own"
            )
        sides = _sides(trajectories, oldest)
        for trajectory, lineages in trajectories.items():
            for sample in lineages:
                side = sides.get(trajectory, 0.0)
                keep = fresh(sample, oldest).astype(np.float32) * (side != 0)
                out[sample] = {KEEP: keep, SIDE: keep * np.float32(side)}
    return out


def _sides(trajectories: dict[str, list[Sample]], oldest: int | None) -> dict[str, float]:
    rewards = {name: lineages[0].reward for name, lineages in trajectories.items()}
    are_fresh = all(any(fresh(s, oldest).any() for s in lineages) for lineages in trajectories.values())
    marks = {name: reward for name, reward in rewards.items() if reward is not None}
    if len(marks) < 2 or not are_fresh or len(set(marks.values())) < 2:
        return {}
    best = max(marks, key=lambda name: marks[name])
    return {name: 1.0 if name == best else -1.0 for name in marks}


def group_sums(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """float[M] -> float64, one a group of the micro-batch."""
    groups = int(batch.groups.max()) + 1 if batch.samples else 0
    owners = batch.groups[batch.owners]
    return values.new_zeros(groups, dtype=torch.float64).index_add(0, owners, values.double())


def complete(batch: MicroBatch) -> torch.Tensor:
    """bool, one a group of the micro-batch: whether it is a pair."""
    return group_sums(batch.column(SIDE).abs(), batch) > 0


def side_sums(values: torch.Tensor, batch: MicroBatch, *, mean: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """float[M] -> float64 of the chosen and of the rejected reply of each group: sums over its tokens, or means."""
    side = batch.column(SIDE)
    totals = [group_sums(torch.where(side == sign, values, 0.0), batch) for sign in (1, -1)]
    if mean:
        sizes = [group_sums((side == sign).float(), batch) for sign in (1, -1)]
        totals = [total / size.clamp(min=1) for total, size in zip(totals, sizes, strict=True)]
    return totals[0], totals[1]


class PairAlgorithm(TokenAlgorithm):
    """What learns from pairs of replies by their log-probabilities."""

    measures = ("kept", "chosen_reward", "rejected_reward", "reward_accuracy", "reward_margin")
    whole = True

    def weigh(
        self, samples: Sequence[Sample], oldest: int | None, scores: Scores | None = None, reduce: Reduce = alone
    ) -> Weights:
        return pair_weights(samples, oldest)

    def count(self, batch: MicroBatch) -> float:
        return float(complete(batch).sum())

    def sums(self, rewards: tuple[torch.Tensor, torch.Tensor], pairs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Implicit rewards float64 of the chosen and of the rejected reply of each group, of which `pairs` bool are
        pairs -> what `measures` names."""
        chosen, rejected = (reward.detach()[pairs] for reward in rewards)
        return {
            "kept": pairs.sum(),
            "chosen_reward": chosen.sum(),
            "rejected_reward": rejected.sum(),
            "reward_accuracy": (chosen > rejected).sum(),
            "reward_margin": (chosen - rejected).sum(),
        }
