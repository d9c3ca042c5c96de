"""An empty store with every table, of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.consumers.warehouse.migrations import migrate
from millrace.consumers.warehouse.store import Store
from tests.support.stores import KINDS, empty_store


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty one, with every table."""
    with empty_store(request.param, tmp_path / "warehouse") as made:
        migrate(made)
        yield made
