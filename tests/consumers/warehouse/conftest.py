"""A store: a directory; a server over HTTP, which is the endpoint in its test mode, or MILLRACE_CLICKHOUSE_URL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from millrace.consumers.warehouse.directory import Directory
from millrace.consumers.warehouse.migrations import migrate
from millrace.consumers.warehouse.server import Server
from millrace.consumers.warehouse.store import Store
from millrace.consumers.warehouse.tables import LOG
from tests.support.clickhouse_server import clickhouse_server

URL = os.environ.get("MILLRACE_CLICKHOUSE_URL", "")


@pytest.fixture(
    scope="module",
    params=[
        "directory",
        pytest.param("endpoint", marks=pytest.mark.slow),
        pytest.param("server", marks=pytest.mark.skipif(not URL, reason="no MILLRACE_CLICKHOUSE_URL")),
    ],
)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """One for all tests of a module: an engine takes a second to start."""
    folder = tmp_path_factory.mktemp("warehouse")
    with ExitStack() as held:
        if request.param == "directory":
            yield held.enter_context(Directory(folder / "warehouse", memory_mb=512))
        else:
            url = held.enter_context(clickhouse_server(folder / "tables")) if request.param == "endpoint" else URL
            yield held.enter_context(Server(url))


@pytest.fixture
def store(opened: Store) -> Store:
    """An empty one, with every table."""
    opened.run(f"DROP DATABASE IF EXISTS {LOG} SYNC")
    migrate(opened)
    return opened
