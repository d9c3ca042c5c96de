"""A store of each kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace.consumers.warehouse.store.base import Store
from millrace.consumers.warehouse.store.migrations import migrate
from millrace.consumers.warehouse.store.tables import LOG
from tests.support.stores import KINDS, empty_store


@pytest.fixture(scope="module", params=KINDS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """One for all tests of a module: an engine takes a second to start."""
    with empty_store(request.param, tmp_path_factory.mktemp("warehouse") / "tables") as made:
        yield made


@pytest.fixture
def store(opened: Store) -> Store:
    """An empty one, with every table."""
    opened.run(f"DROP DATABASE IF EXISTS {LOG} SYNC")
    migrate(opened)
    return opened
