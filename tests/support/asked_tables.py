"""A small warehouse for tests of asking: one table of the log, one view, a file that nobody may read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.consumers.warehouse.endpoint.app import QueryEndpoint
from millrace.consumers.warehouse.endpoint.query import QueryLimits, QueryRunner
from millrace.consumers.warehouse.endpoint.serve import Serving
from millrace.consumers.warehouse.store.base import Store
from millrace.consumers.warehouse.store.directory import TableDirectory
from millrace.infra.process.net import free_ports

ROWS = 100_000
CANARY = "canary-of-another-process"
KEY = "the-key-of-this-test"


def fill(store: Store) -> None:
    """The table `millrace_log.places` of ROWS rows, the view `millrace.steps` over it, and a table that is no
    reader's."""
    store.run(
        "CREATE TABLE millrace_log.places (off UInt64, name String, tokens Array(UInt32))"
        " ENGINE = MergeTree ORDER BY off"
    )
    store.run(f"INSERT INTO millrace_log.places SELECT number, toString(number), [1, 2, 3] FROM numbers({ROWS})")
    store.run("CREATE VIEW millrace.steps AS SELECT off, name FROM millrace_log.places")
    store.run("DROP DATABASE IF EXISTS others SYNC")
    store.run("CREATE DATABASE others")
    store.run(f"CREATE TABLE others.secret ENGINE = MergeTree ORDER BY a AS SELECT '{CANARY}' AS a")


@contextmanager
def asked_tables(folder: Path, url: str = "") -> Iterator[TableDirectory]:
    """The warehouse, open, and `folder/canary` beside it."""
    (folder / "canary").write_text(CANARY)
    with TableDirectory(folder / "tables", url=url) as directory:
        fill(directory)
        yield directory


@contextmanager
def answering(folder: Path) -> Iterator[str]:
    """The endpoint over it, for the user `millrace` with KEY; gives its URL."""
    with asked_tables(folder) as directory:
        serving = Serving(QueryEndpoint(QueryRunner(directory.handle, QueryLimits(seconds=30)), KEY), free_ports(1)[0])
        try:
            yield serving.url
        finally:
            serving.close()
