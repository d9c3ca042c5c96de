"""Preferences, reward models and teachers on data made from the sort task: each gets better at what it measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.objectives import curve
from millrace.apps.demo import tiny
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.state import State

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> State:
    path: Path = tmp_path_factory.mktemp("policy")
    tiny.make_sort_policy(path, seed=0)
    return checkpoint.adopt(path)


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo"])
def test_preferences_are_learned(warm: State, name: str) -> None:
    accuracy = curve(name, warm, steps=40)
    assert sum(accuracy[-5:]) / 5 >= 0.95


def test_good_is_told_from_bad_without_pairs(warm: State) -> None:
    accuracy = curve("kto", warm, steps=90)
    assert sum(accuracy[:5]) / 5 <= 0.6
    assert sum(accuracy[-10:]) / 10 >= 0.75


def test_a_reward_model_tells_right_from_wrong(warm: State) -> None:
    correct = curve("reward-model", warm, steps=140)
    assert sum(correct[:3]) / 3 <= 0.7
    assert sum(correct[-10:]) / 10 >= 0.95


@pytest.mark.parametrize("name", ["distill-forward", "distill-reverse", "sft"])
def test_a_student_comes_near_its_teacher(warm: State, name: str) -> None:
    losses = curve(name, warm, steps=60)
    assert losses[-1] < 0.5 * losses[0]
