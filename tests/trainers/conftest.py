"""Fixtures of the trainers' tests. One thread: the same numbers on every machine of a kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.support.ranks import Ranks

settings.register_profile("trainers", deadline=None, derandomize=True)
settings.load_profile("trainers")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Three learner processes that live for the whole run."""
    with Ranks(3) as pool:
        yield pool
