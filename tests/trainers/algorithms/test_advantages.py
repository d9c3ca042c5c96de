from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.samples import random_samples
from trainers.algorithms.advantages import group_advantages, normalise, rewards_by_group

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def test_worked_vector() -> None:
    assert normalise([1, 0, 0, 0]) == pytest.approx([1.4997, -0.4999, -0.4999, -0.4999], abs=1e-4)
    assert normalise([1, 0, 0, 0], eps=1e-5) == pytest.approx([1.49997, -0.49999, -0.49999, -0.49999], abs=1e-5)


@pytest.mark.parametrize("rewards", [[], [3.0], [2.0, 2.0, 2.0]])
def test_nothing_to_compare_is_no_advantage(rewards: list[float]) -> None:
    assert normalise(rewards) == [0.0] * len(rewards)


@given(REWARDS)
def test_against_numpy(rewards: list[float]) -> None:
    mean, std = np.mean(rewards), np.std(rewards, ddof=1)
    assert normalise(rewards) == pytest.approx([(r - mean) / (std + 1e-4) for r in rewards], abs=1e-9)


@given(REWARDS, st.floats(-5, 5))
def test_a_shift_of_all_rewards_changes_nothing(rewards: list[float], shift: float) -> None:
    assert normalise([r + shift for r in rewards]) == pytest.approx(normalise(rewards), abs=1e-6)


@given(st.integers(0, 1000), st.randoms())
def test_lineages_share_the_advantage_of_their_trajectory(seed: int, draw: random.Random) -> None:
    samples = random_samples(seed)
    advantages = group_advantages(rewards_by_group(samples))
    assert advantages.keys() == {s.trajectory for s in samples}
    shuffled = list(samples)
    draw.shuffle(shuffled)
    assert group_advantages(rewards_by_group(shuffled)) == advantages
    first = {s.trajectory: s.reward for s in samples if s.group == "group-0"}
    assert [advantages[t] for t in sorted(first)] == normalise([first[t] or 0.0 for t in sorted(first)])
