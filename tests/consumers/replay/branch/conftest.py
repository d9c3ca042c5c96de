from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from millrace.apps.demo import tiny
from tests.support.branches import play
from tests.support.learners import Place


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def beginner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sorts a fifth of what it is given."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("beginner")
    tiny.make_sort_policy(directory, target=0.2)
    return directory


@pytest.fixture
def place(tmp_path: Path, beginner: Path) -> Iterator[Place]:
    """A policy of that model with 400 groups of 4 replies in its log."""
    made = Place(tmp_path, model=beginner, **{"policy.group_size": 4})
    play(made.bus, made.settings, beginner, range(400), size=4)
    yield made
    made.bus.close()
