from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.trainers.algorithms.policy_loss import cispo, clipped_surrogate, sapo, sequence_advantages, sequence_ratio
from millrace.trainers.batches.packing import pack
from tests.support.samples import random_samples
from tests.trainers.algorithms.weighing import current

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
    losses, won = clipped_surrogate(column(ratio), column(advantage), 0.2, 0.28)
    assert losses.item() == pytest.approx(loss)
    assert won.item() is clipped


@pytest.mark.parametrize(("ratio", "advantage", "loss"), [(10, -1, 3), (2, -1, 2), (10, 1, -1.2), (0.1, -2, 1.6)])
def test_the_dual_clip_bites_for_negative_advantages_only(ratio: float, advantage: float, loss: float) -> None:
    assert clipped_surrogate(column(ratio), column(advantage), 0.2, 0.2, 3.0)[0].item() == pytest.approx(loss)


@given(LOGPROB, LOGPROB, st.floats(-3, 3), st.floats(0, 0.9), st.floats(0, 5), st.none() | st.floats(1.1, 4))
def test_against_the_formula_written_out(
    new: float, old: float, advantage: float, low: float, high: float, dual: float | None
) -> None:
    ratio = math.exp(new - old)
    bounded = min(max(ratio, 1 - low), 1 + high)
    expected = -min(ratio * advantage, bounded * advantage)
    if dual is not None and advantage < 0:
        expected = min(expected, dual * abs(advantage))
    losses, _ = clipped_surrogate(column(ratio), column(advantage), low, high, dual)
    assert losses.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_finite_differences() -> None:
    torch.manual_seed(0)
    old = -torch.rand(64, dtype=torch.float64) * 4
    gap = torch.randn(64, dtype=torch.float64)
    gap = torch.where((torch.exp(gap) - 0.8).abs() < 0.05, gap + 0.2, gap)  # away from the kinks
    gap = torch.where((torch.exp(gap) - 1.28).abs() < 0.05, gap + 0.2, gap)
    advantages = torch.randn(64, dtype=torch.float64)
    new = (old + gap).requires_grad_()
    losses = (
        lambda x: clipped_surrogate(torch.exp(x - old), advantages, 0.2, 0.28)[0],
        lambda x: clipped_surrogate(torch.exp(x - old), advantages, 0.2, 0.28, 1.5)[0],
        lambda x: sapo(torch.exp(x - old), advantages, 1.0, 1.05),
    )
    for loss in losses:
        assert torch.autograd.gradcheck(loss, (new,))


def test_the_gradient_stops_where_the_clip_wins() -> None:
    new = column(0.0, math.log(2.0), math.log(2.0)).requires_grad_()
    clipped_surrogate(torch.exp(new), column(1, 1, -1), 0.2, 0.28)[0].sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-1.0, 0.0, 2.0])


@pytest.mark.parametrize("tau", [0.5, 1.0, 1.05, 3.0])
def test_sapo_has_slope_one_where_the_ratio_is_one(tau: float) -> None:
    new = column(0.0).requires_grad_()
    loss = sapo(torch.exp(new), column(1.0), tau, 1.05)
    loss.backward()
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(-1.0)
    if tau == 1.0:
        assert loss.item() == pytest.approx(-2.0)


def test_sapo_takes_its_steepness_from_the_sign() -> None:
    ratio = column(1.7, 1.7, 1.7)
    gates = sapo(ratio, column(1, -1, 0), 2.0, 0.5).tolist()
    assert gates[0] == pytest.approx(-(4 / 2.0) / (1 + math.exp(-2.0 * 0.7)))
    assert gates[1] == pytest.approx((4 / 0.5) / (1 + math.exp(-0.5 * 0.7)))
    assert gates[2] == 0


def test_cispo_drops_no_token() -> None:
    """The gradient of a token is minus its bounded ratio times its advantage, however far the ratio is."""
    ratio = column(0.01, 1.0, 3.0, 100.0)
    new = ratio.log().requires_grad_()
    cispo(new, torch.exp(new), column(1, 2, -1, 1), 1.0, 4.0).sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-0.01, -2, 3, -5])


def test_a_sample_has_one_ratio_and_one_advantage() -> None:
    batch = pack(random_samples(0, groups=2))
    keep = (torch.arange(batch.trainable) % 3 != 0).double()
    log_ratio = current(batch) - batch.behaviour
    advantages = torch.arange(batch.trainable, dtype=torch.float64)
    ratio, mean = sequence_ratio(log_ratio, keep, batch), sequence_advantages(advantages, keep, batch)
    for owner in range(batch.samples):
        mine = (batch.owners == owner) & (keep > 0)
        at = batch.owners == owner
        if mine.any():
            assert ratio[at].tolist() == pytest.approx([math.exp(float(log_ratio[mine].mean()))] * int(at.sum()))
            assert mean[at].tolist() == pytest.approx([float(advantages[mine].mean())] * int(at.sum()))
    poisoned = torch.where(keep > 0, log_ratio, torch.nan)
    assert torch.equal(sequence_ratio(poisoned, keep, batch), ratio)


def test_an_empty_micro_batch_has_no_ratios() -> None:
    empty = replace(pack([]))
    assert sequence_ratio(torch.zeros(0), torch.zeros(0), empty).numel() == 0
