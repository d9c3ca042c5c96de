"""What the tests of training from files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.trainers.offline.text import Encoder
from tests.support import lessons


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The untrained tiny model."""
    return lessons.untrained(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def encoder(model: Path) -> Encoder:
    return Encoder(model)
