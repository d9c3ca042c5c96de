"""Distances to a teacher, and the critic's loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.trainers.algorithms.distill import divergence, towards
from millrace.trainers.algorithms.value_loss import clipped_value_loss

NUMBER = st.floats(-3, 3)


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(4, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    return student, teacher


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_divergences_against_torch_s(direction: str) -> None:
    student, teacher = (x.log_softmax(-1) for x in distributions(0))
    pair = (student, teacher) if direction == "forward" else (teacher, student)
    expected = torch.nn.functional.kl_div(*pair, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(divergence(student, teacher, direction), expected)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_finite_differences(direction: str) -> None:
    student, teacher = distributions(1)
    student.requires_grad_()
    target = teacher.log_softmax(-1)
    assert torch.autograd.gradcheck(lambda x: divergence(x.log_softmax(-1), target, direction), (student,))


def test_sampled_distances() -> None:
    """In expectation over the student the gradient is the reverse KL's, and its value is where the student drew."""
    student, teacher = distributions(2)
    student, target = student[0].requires_grad_(), teacher[0].log_softmax(-1)
    logp = student.log_softmax(-1)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - target)).sum(), student, retain_graph=True)
    drawn = towards(target, logp, logp.detach())
    (sampled,) = torch.autograd.grad((logp.detach().exp() * drawn).sum(), student, retain_graph=True)
    torch.testing.assert_close(sampled, exact)
    torch.testing.assert_close(drawn, logp - target)


@given(NUMBER, NUMBER, NUMBER, st.none() | st.floats(0.1, 2), st.none() | st.floats(0.1, 2))
def test_the_value_loss_against_the_formula(
    value: float, old: float, target: float, clip: float | None, huber: float | None
) -> None:
    def error(x: float) -> float:
        if huber is None or abs(x) <= huber:
            return 0.5 * x * x
        return huber * (abs(x) - 0.5 * huber)

    expected = error(value - target)
    if clip is not None:
        expected = max(expected, error(min(max(value, old - clip), old + clip) - target))
    columns = [torch.tensor([x], dtype=torch.float64) for x in (value, old, target)]
    assert clipped_value_loss(*columns, clip, huber)[0].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("clip", "huber"), [(0.5, None), (None, None), (0.5, 1.0)])
def test_finite_differences_of_the_value_loss(clip: float | None, huber: float | None) -> None:
    generator = torch.Generator().manual_seed(3)
    values, old, target = (torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(3))
    assert torch.autograd.gradcheck(
        lambda x: clipped_value_loss(x, old, target, clip, huber)[0], (values.requires_grad_(),)
    )


def test_a_value_that_moved_far_stops_pulling() -> None:
    value = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    losses, clipped = clipped_value_loss(value, torch.zeros(1), torch.tensor([4.0], dtype=torch.float64), 0.5, None)
    losses.backward()
    assert clipped.item()
    assert value.grad is not None
    assert value.grad.item() == 0
