"""A store: a directory; a server over HTTP, which is the endpoint in its test mode, or MILLRACE_CLICKHOUSE_URL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from millrace.consumers.warehouse.directory import Directory
from millrace.consumers.warehouse.migrations import migrate
from millrace.consumers.warehouse.server import Server
from millrace.consumers.warehouse.store import Store
from millrace.consumers.warehouse.tables import LOG
from tests.support.clickhouse_server import clickhouse_server

URL = os.environ.get("MILLRACE_CLICKHOUSE_URL", "")


@pytest.fixture(
    params=[
        "directory",
        pytest.param("endpoint", marks=pytest.mark.slow),
        pytest.param("server", marks=pytest.mark.skipif(not URL, reason="no MILLRACE_CLICKHOUSE_URL")),
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty one, with every table."""
    with ExitStack() as held:
        made: Store
        if request.param == "directory":
            made = held.enter_context(Directory(tmp_path / "warehouse", memory_mb=512))
        else:
            url = held.enter_context(clickhouse_server(tmp_path / "tables")) if request.param == "endpoint" else URL
            made = held.enter_context(Server(url))
        made.run(f"DROP DATABASE IF EXISTS {LOG} SYNC")
        migrate(made)
        yield made
