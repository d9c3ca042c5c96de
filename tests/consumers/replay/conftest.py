from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.learners import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    """Makes learners on the bus in memory, with as many threads as a learner's process has."""
    made: list[Place] = []
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def make(**flags: Any) -> Place:
        made.append(Place(tmp_path / f"place-{len(made)}", **flags))
        return made[-1]

    yield make
    for one in made:
        one.bus.close()
    torch.set_num_threads(before)
