from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainers.algorithms.policy_loss import behaviour_weight, clipped_surrogate

LOGPROB = st.floats(-6, 0)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 1.0, -1.0, False),
        (1.28, 1.0, -1.28, False),
        (1.5, 1.0, -1.28, True),
        (0.5, 1.0, -0.5, False),
        (0.5, -1.0, 0.8, True),
        (1.5, -1.0, 1.5, False),
        (10.0, -1.0, 10.0, False),
        (3.0, 0.0, 0.0, False),
    ],
)
def test_worked_vectors(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    losses, won = clipped_surrogate(column(math.log(ratio)), column(0.0), column(advantage), 0.2, 0.28)
    assert losses.item() == pytest.approx(loss)
    assert won.item() is clipped


@given(LOGPROB, LOGPROB, st.floats(-3, 3), st.floats(0, 0.9), st.floats(0, 5))
def test_against_the_formula_written_out(new: float, old: float, advantage: float, low: float, high: float) -> None:
    ratio = math.exp(new - old)
    bounded = min(max(ratio, 1 - low), 1 + high)
    expected = -min(ratio * advantage, bounded * advantage)
    losses, _ = clipped_surrogate(column(new), column(old), column(advantage), low, high)
    assert losses.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_finite_differences() -> None:
    torch.manual_seed(0)
    old = -torch.rand(64, dtype=torch.float64) * 4
    gap = torch.randn(64, dtype=torch.float64)
    gap = torch.where((torch.exp(gap) - 0.8).abs() < 0.05, gap + 0.2, gap)  # away from the kinks
    gap = torch.where((torch.exp(gap) - 1.28).abs() < 0.05, gap + 0.2, gap)
    advantages = torch.randn(64, dtype=torch.float64)
    new = (old + gap).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: clipped_surrogate(x, old, advantages, 0.2, 0.28)[0], (new,))


def test_the_gradient_stops_where_the_clip_wins() -> None:
    new = column(0.0, math.log(2.0), math.log(2.0)).requires_grad_()
    clipped_surrogate(new, column(0, 0, 0), column(1, 1, -1), 0.2, 0.28)[0].sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-1.0, 0.0, 2.0])


def test_the_behaviour_weight_is_capped_above_only() -> None:
    weights = behaviour_weight(column(0.0, 5.0, -5.0), column(0.0, 0.0, 0.0), 2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-5)])
