"""Estimators against enumeration, known values and repeated experiments."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.trainers.evaluation.estimators import bootstrap, pass_at_k, summary, wilson


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_choices(numbers: tuple[int, int, int]) -> None:
    n, right, k = numbers
    answers = [True] * right + [False] * (n - right)
    choices = [any(choice) for choice in combinations(answers, k)]
    assert pass_at_k(n, right, k) == pytest.approx(sum(choices) / len(choices))


def test_pass_at_k_of_many_answers_does_not_overflow() -> None:
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)


@pytest.mark.parametrize(("n", "right", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)])
def test_what_cannot_be_estimated_is_refused(n: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="cannot be estimated"):
        pass_at_k(n, right, k)


def test_wilson_against_published_values() -> None:
    one = wilson(81, 263)
    assert (one.value, one.low, one.high) == pytest.approx((0.30798, 0.2553, 0.3662), abs=1e-4)
    none = wilson(0, 20)
    assert none.low == 0
    assert none.high == pytest.approx(0.1611, abs=1e-4)
    assert wilson(20, 20).high == 1


def test_the_bootstrap_is_seeded_and_near_the_normal_interval() -> None:
    values = np.random.Generator(np.random.PCG64(0)).normal(2.0, 1.0, 400).tolist()
    one = bootstrap(values, seed=1)
    assert one == bootstrap(values, seed=1) != bootstrap(values, seed=2)
    half = 1.96 * np.std(values) / math.sqrt(400)
    assert (one.low, one.high) == pytest.approx((one.value - half, one.value + half), abs=0.1 * half)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    draw = np.random.Generator(np.random.PCG64(3))
    held = 0
    for trial in range(100):
        # 60 questions of their own difficulty, 8 answers each: the mean is 1/2 over all questions there are.
        right = draw.binomial(8, draw.beta(1, 1, 60))
        one = bootstrap([pass_at_k(8, int(c), 1) for c in right], seed=trial, draws=300)
        held += one.low <= 0.5 <= one.high
    assert 88 <= held <= 99


def test_a_summary_counts_what_was_judged() -> None:
    found = summary([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.5], []], [1, 4])
    assert found["mean"].value == pytest.approx((0.25 + 1 + 0.5) / 3)
    assert found["mean"].questions == 3
    assert found["pass@1"].value == pytest.approx((0.25 + 1 + 0) / 3)
    assert found["pass@4"].value == 1.0
    assert found["pass@4"] == wilson(2, 2), "all of two are right, and the interval is not empty"
    assert found["pass@4"].low < 1.0
    assert summary([[0.5], [0.2]], [1], success=0.5)["pass@1"] == wilson(1, 2)
    assert math.isnan(summary([[], []], [1])["mean"].value)
