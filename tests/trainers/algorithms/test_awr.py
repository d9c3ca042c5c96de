"""Advantage-weighted regression: weights by hand, their bound, and what takes no part."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.trainers.algorithms.awr import WEIGHT, Awr
from millrace.trainers.algorithms.registry import algorithm
from millrace.trainers.batches.packing import KEEP
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration
from tests.support.samples import random_samples
from tests.trainers.algorithms.weighing import by_sample, current, weighed


def group(rewards: list[float | None]) -> list[Sample]:
    """One group of as many trajectories, one lineage each."""
    found = random_samples(3, groups=1, group_size=len(rewards))
    firsts = sorted((s for s in found if s.lineage == 0), key=lambda s: s.trajectory)
    return [replace(s, reward=reward) for s, reward in zip(firsts, rewards, strict=True)]


def weights(kind: Awr, samples: list[Sample]) -> list[float]:
    """The weight of each sample, which all of its tokens have."""
    found = kind.weigh(samples, None)
    assert all(len(set(found[s][WEIGHT].tolist())) == 1 for s in samples)
    return [float(found[s][WEIGHT][0]) for s in samples]


def test_by_hand() -> None:
    """Rewards 0, 0.5, 1 have the mean 0.5; with beta 0.5 advantages of -0.5, 0, 0.5 weigh 1/e, 1, e."""
    samples = group([0.0, 0.5, 1.0])
    kind = Awr(beta=0.5)
    assert weights(kind, samples) == pytest.approx([0.36787944, 1.0, 2.71828183], rel=1e-6)
    batch = weighed(kind, samples)
    logp = current(batch)
    loss, sums = kind.loss(logp, torch.zeros_like(logp), batch)
    said = [float(x.sum()) for x in (by_sample(batch, logp)[s] for s in samples)]
    assert float(loss) == pytest.approx(-(0.36787944 * said[0] + said[1] + 2.71828183 * said[2]), rel=1e-6)
    assert kind.count(batch) == sum(s.trainable for s in samples)
    assert float(sums["clipped"]) == 0


def test_weights_are_bound_and_what_is_at_the_bound_is_counted() -> None:
    """An advantage of 1/2 at beta 0.1 weighs e^5 = 148, at beta 1e-9 more than a number holds: 20 is the most."""
    samples = group([0.0, 1.0])
    for beta in (0.1, 1e-9):
        assert weights(Awr(beta=beta), samples) == pytest.approx([math.exp(-0.5 / beta), 20.0])
    batch = weighed(Awr(), samples)
    wide = weighed(Awr(beta=0.1), samples)
    for kind, found, bound in ((Awr(), batch, 0), (Awr(beta=0.1), wide, samples[1].trainable)):
        logp = current(found)
        assert float(kind.loss(logp, torch.zeros_like(logp), found)[1]["clipped"]) == bound


def test_without_a_reward_or_too_old_nothing_pulls() -> None:
    samples = group([None, 0.0, 1.0])
    found = Awr().weigh(samples, None)
    assert not found[samples[0]][KEEP].any()
    assert weights(Awr(), samples[1:]) == pytest.approx(weights(Awr(), samples)[1:]), "and is in no mean"
    assert not any(found[KEEP].any() for found in Awr().weigh(samples, 1 << 30).values())
    assert all(found[KEEP].all() for found in Awr().weigh(samples[1:], None).values())


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=6), st.floats(-5, 5))
def test_a_reward_that_all_get_changes_nothing_and_better_ones_never_count_less(
    rewards: list[float], shift: float
) -> None:
    found = weights(Awr(), group([*rewards]))
    moved = weights(Awr(), group([reward + shift for reward in rewards]))
    assert moved == pytest.approx(found, rel=1e-5)
    ranked = [weight for _, weight in sorted(zip(rewards, found, strict=True))]
    assert ranked == sorted(ranked)


@pytest.mark.parametrize("knobs", [{"beta": 0.0}, {"beta": math.inf}, {"weight_clip": -1.0}, {"minibatches": 0}])
def test_what_makes_no_sense_is_refused(knobs: dict[str, float]) -> None:
    with pytest.raises(BadConfiguration, match="must be above 0"):
        algorithm("awr", **knobs)
