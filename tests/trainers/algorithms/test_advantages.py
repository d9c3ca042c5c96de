from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.trainers.algorithms.advantages import (
    by_turn,
    gae,
    lambdas,
    longest_reply,
    outcome_rewards,
    overlong_penalty,
    shape,
    turn_gae,
    turns_of,
)

ROWS = st.lists(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.booleans()), max_size=9), max_size=5)


def column(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


@pytest.mark.parametrize(
    ("length", "penalty"), [(3584, 0), (3585, -0.00195), (3840, -0.5), (4096, -1), (5000, -1), (10, 0)]
)
def test_overlong_vectors(length: int, penalty: float) -> None:
    assert overlong_penalty(column(length), limit=4096, buffer=512, factor=1.0)[0] == pytest.approx(penalty, abs=1e-5)


def test_rewards_are_shifted_scaled_then_clipped() -> None:
    assert shape(column(0, 1, 9), bias=-0.5, scale=10, clip=20).tolist() == [-5, 5, 20]


def test_the_last_trainable_token_earns_the_outcome() -> None:
    assert outcome_rewards(np.zeros(4), np.array([1, 0, 3]), column(5, 6, 7)).tolist() == [5, 0, 0, 7]


@given(ROWS, st.floats(0, 1), st.floats(0, 1), st.floats(-2, 2))
def test_gae_skips_masked_tokens_as_the_padded_form_does(
    rows: list[list[tuple[float, float, bool]]], discount: float, lam: float, end: float
) -> None:
    """verl's form: where the mask is 0 the running advantage and the next value are carried through unchanged."""
    expected: list[float] = []
    for row in rows:
        ahead, following, out = 0.0, end, []
        for reward, value, trainable in reversed(row):
            delta = reward + discount * following - value
            if trainable:
                ahead, following = delta + discount * lam * ahead, value
                out.append(ahead)
        expected += reversed(out)
    flat = [(r, v) for row in rows for r, v, trainable in row if trainable]
    lengths = np.array([sum(t for *_, t in row) for row in rows], np.int64)
    found = gae(
        column(*(r for r, _ in flat)),
        column(*(v for _, v in flat)),
        lengths,
        discount=discount,
        lam=np.full(len(rows), lam),
        bootstrap=np.full(len(rows), end),
    )
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_without_a_critic_every_token_gets_the_outcome_less_the_kl_to_go() -> None:
    earned = column(-1, -2, 10 - 3)
    nothing = {"discount": 1.0, "lam": np.ones(1), "bootstrap": np.zeros(1)}
    assert gae(earned, np.zeros(3), np.array([3]), **nothing).tolist() == [4, 5, 7]


def test_turns_are_steps_and_gaps_cost_no_discount() -> None:
    """Two turns of two tokens: rewards summed, the value of the first token, one advantage for both tokens."""
    rewards, values = column(1, 2, 0, 4), column(0.5, 9, 1.5, 9)
    for turns in ([0, 0, 1, 1], [3, 3, 70, 70]):
        found, returns = turn_gae(
            rewards,
            values,
            np.array(turns),
            np.array([4]),
            discount=0.9,
            lam=np.array([0.5]),
            bootstrap=np.array([2.0]),
        )
        last = 4 + 0.9 * 2.0 - 1.5
        first = 3 + 0.9 * 1.5 - 0.5 + 0.9 * 0.5 * last
        assert found.tolist() == pytest.approx([first, first, last, last])
        assert returns.tolist() == pytest.approx([first + 0.5] * 2 + [last + 1.5] * 2)


def test_turns_are_what_was_generated_in_one_piece() -> None:
    masks = [np.array(m, np.uint8) for m in ([0, 1, 1, 0, 1], [0, 1], [0, 0])]
    turns = turns_of(masks)
    assert turns.tolist() == [1, 1, 2, 1]
    assert [longest_reply(mask) for mask in masks] == [2, 1, 0]
    starts, counts = by_turn(turns, np.array([3, 1, 0]))
    assert (starts.tolist(), counts.tolist()) == ([0, 2, 3], [2, 1, 0])


def test_lambda_may_follow_the_length() -> None:
    lengths = np.array([1, 10, 100])
    assert lambdas("constant", 0.9, lengths).tolist() == [0.9] * 3
    assert lambdas("length", 0.05, lengths).tolist() == pytest.approx([0, 0, 0.8])
    relative = lambdas("relative", 0.5, lengths)
    assert (relative[1:] ** (lengths[1:] - 1)).tolist() == pytest.approx([0.5, 0.5])
