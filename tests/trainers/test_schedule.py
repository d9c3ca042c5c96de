from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_cosine_with_min_lr_schedule_with_warmup, get_linear_schedule_with_warmup

from millrace.trainers.errors import BadConfiguration
from millrace.trainers.schedule import DECAYS, Schedule


def test_warm_up_goes_by_optimizer_steps() -> None:
    schedule = Schedule(lr=1.0, warmup=4)
    assert [schedule.at(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert Schedule(lr=2.0).at(0) == 2.0


def test_linear() -> None:
    schedule = Schedule(lr=2.0, warmup=2, decay="linear", total=6, floor=0.5)
    assert [schedule.at(step) for step in range(8)] == [1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0]


def test_cosine() -> None:
    schedule = Schedule(lr=1.0, decay="cosine", total=4, floor=0.1)
    rates = [schedule.at(step) for step in range(6)]
    assert rates == pytest.approx(
        [1.0, 0.1 + 0.45 * (1 + math.sqrt(0.5)), 0.55, 0.1 + 0.45 * (1 - math.sqrt(0.5)), 0.1, 0.1]
    )


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_after_warm_up_it_falls_as_transformers_do(decay: Any) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if decay == "linear":
        theirs = get_linear_schedule_with_warmup(optimizer, 3, 20)
    else:
        theirs = get_cosine_with_min_lr_schedule_with_warmup(optimizer, 3, 20, min_lr_rate=0.2)
    ours = Schedule(1.0, 3, decay, 20, 0.0 if decay == "linear" else 0.2)
    for step in range(25):
        if 3 <= step <= 20:  # theirs rises again after the end of a cosine
            assert ours.at(step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


@given(st.sampled_from(DECAYS), st.integers(0, 20), st.integers(1, 50), st.floats(0, 1))
def test_it_rises_then_falls_within_its_bounds(decay: Any, warmup: int, more: int, floor: float) -> None:
    schedule = Schedule(3.0, warmup, decay, warmup + more, floor)
    rates = [schedule.at(step) for step in range(warmup + more + 5)]
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert all(0 <= rate <= 3.0 for rate in rates)
    assert rates[warmup] == 3.0
    assert rates[-1] == pytest.approx(3.0 if decay == "constant" else 3.0 * floor)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay": "exponential"}, "choose one of constant, linear, cosine"),
        ({"decay": "cosine"}, "has no step to fall in"),
        ({"decay": "linear", "warmup": 5, "total": 5}, "above its warm-up"),
        ({"floor": 1.5}, "a share in 0..1"),
    ],
)
def test_impossible_schedules_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfiguration, match=message):
        Schedule(1.0, **settings)
