"""Effective sample size, KL and ratios, against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.consumers.replay.branch import guard
from millrace.infra.errors import BranchError

LOGS = st.lists(st.floats(-8, 8), min_size=1, max_size=40)


@given(LOGS)
def test_the_share_is_that_of_kish_and_lies_between_one_sample_and_all(logs: list[float]) -> None:
    weights = np.exp(np.array(logs))
    found = guard.effective(np.array(logs))
    assert found == pytest.approx(weights.sum() ** 2 / (weights**2).sum() / len(logs))
    assert 1 / len(logs) - 1e-9 <= found <= 1 + 1e-9


@given(LOGS, st.floats(-600, 600))
def test_a_common_factor_changes_no_share(logs: list[float], shift: float) -> None:
    moved = guard.effective(np.array(logs) + shift)
    assert moved == pytest.approx(guard.effective(np.array(logs)), rel=1e-6)


@given(st.lists(st.lists(st.floats(-5, 5), max_size=6), min_size=1, max_size=12))
def test_what_is_reported_follows_the_definitions(samples: list[list[float]]) -> None:
    found = guard.reach([np.array(one, np.float64) for one in samples])
    flat = [d for one in samples for d in one]
    assert (found.sequences, found.tokens) == (sum(bool(one) for one in samples), len(flat))
    if flat:
        assert found.kl == pytest.approx(sum(math.exp(d) - 1 - d for d in flat) / len(flat), abs=1e-9)
        assert found.kl >= 0
        assert found.outside == pytest.approx(sum(not math.log(0.5) <= d <= math.log(2) for d in flat) / len(flat))
        sums = np.array([sum(one) for one in samples if one])
        assert found.sequence_ess == pytest.approx(guard.effective(sums))


def test_the_same_policy_reaches_all_of_it_and_nothing_reaches_nothing() -> None:
    same = guard.reach([np.zeros(4)] * 5)
    assert (same.sequence_ess, same.token_ess, same.kl, same.outside, same.word) == (1, 1, 0, 0, "good")
    assert guard.reach([]).word == "refused"


@pytest.mark.parametrize(("heavy", "word"), [(0, "good"), (3, "low"), (50, "refused")])
def test_one_heavy_sample_is_warned_of_and_then_refused(heavy: float, word: str) -> None:
    found = guard.reach([np.array([0.0])] * 30 + [np.array([float(heavy)])])
    if word == "refused":
        with pytest.raises(BranchError, match="--anyway"):
            guard.refuse(found)
    else:
        guard.refuse(found)
    assert found.word == word


def test_numbers_that_overflow_are_no_error() -> None:
    found = guard.reach([np.array([2000.0]), np.array([-2000.0]), np.array([math.nan])])
    assert 0 < found.sequence_ess <= 1 / 3 + 1e-9
    assert not math.isfinite(found.kl)
