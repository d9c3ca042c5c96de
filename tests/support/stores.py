"""Where a warehouse may keep its tables, for tests that every kind must pass: a directory; a server over HTTP, which is
the endpoint in its test mode; and the server of MILLRACE_CLICKHOUSE_URL, where that is set.

That server is for tests alone: both databases of the warehouse are dropped there before each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from millrace.consumers.warehouse.store.base import Store
from millrace.consumers.warehouse.store.directory import TableDirectory
from millrace.consumers.warehouse.store.server import Server
from millrace.consumers.warehouse.store.tables import LOG, VIEWS
from tests.support.clickhouse_server import clickhouse_server

URL = os.environ.get("MILLRACE_CLICKHOUSE_URL", "")
SERVERS = [pytest.param("over_http", marks=pytest.mark.slow), *(["server"] if URL else [])]
KINDS = [pytest.param("directory", marks=pytest.mark.slow), *SERVERS]
"""parameters of a fixture; every kind starts an engine"""


@contextmanager
def server_url(kind: str, path: Path) -> Iterator[str]:
    """The URL of a server of a kind of SERVERS, without any database of the warehouse. path: for its tables."""
    with ExitStack() as held:
        url = held.enter_context(clickhouse_server(path)) if kind == "over_http" else URL
        with Server(url) as server:
            for database in (VIEWS, LOG):
                server.run(f"DROP DATABASE IF EXISTS {database} SYNC")
        yield url


@contextmanager
def empty_store(kind: str, path: Path) -> Iterator[Store]:
    """A store of a kind of KINDS, without tables, in `path` where it is of this machine."""
    if kind == "directory":
        with TableDirectory(path, memory_mb=512) as store:
            yield store
        return
    with server_url(kind, path) as url, Server(url) as server:
        server.prepare()
        yield server
