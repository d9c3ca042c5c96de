"""Steps that repeat themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from millrace.trainers.backends.seeding import repeatable, seed_step


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def test_a_step_of_a_rank_draws_its_own() -> None:
    drawn = {}
    for place in [(0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0)]:
        seed_step(*place)
        drawn[place] = float(torch.rand(()))
        torch.rand(7)
        seed_step(*place)
        assert float(torch.rand(())) == drawn[place]
    assert len(set(drawn.values())) == len(drawn)


def test_cublas_is_told_before_torch_insists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    repeatable(False)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    repeatable(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_choice_of_the_user_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    repeatable(True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
