from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.learners import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    """Makes places, numbered."""
    made: list[Place] = []

    def make(**flags: Any) -> Place:
        made.append(Place(tmp_path / f"place-{len(made)}", **flags))
        return made[-1]

    yield make
    for one in made:
        one.bus.close()
