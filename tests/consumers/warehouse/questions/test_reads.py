"""How much of a long history each documented question reads, in shares of what a scan of all columns of its events
reads: bytes and rows, which no load changes. The limits are those of `bench_questions`, whose history this is, in
shares of bytes; it gives them in CPU time too. `MILLRACE_QUESTION_STEPS` says how long the history is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from benchmarks.bench_questions import AGGREGATE, AGGREGATES, ANY, CHUNK, LIMITS, asked, fill
from millrace.consumers.warehouse.endpoint.handles import handle
from millrace.consumers.warehouse.open_store import make_tables
from millrace.consumers.warehouse.questions.catalog import questions
from millrace.consumers.warehouse.store.directory import TableDirectory

STEPS = int(os.environ.get("MILLRACE_QUESTION_STEPS", "200000"))
GRANULE = 8192
"""rows that the engine reads at least, where it reads any"""
SEARCHED = 12
"""granules that suffice in a part of each table for what has an index"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300 + STEPS // 1000)]


class Read(NamedTuple):
    """What a query read."""

    rows: int
    size: int


class Long(NamedTuple):
    """A long history: what a scan reads, and what each question does."""

    scan: Read
    questions: dict[str, Read]


def read(store: TableDirectory, sql: str, parameters: dict[str, str]) -> Read:
    """What a query reads, nothing of it remembered from another."""
    with handle(store.handle) as engine:
        engine.text("USE millrace")
        engine.text("SET use_query_condition_cache = 0")
        found = engine.run(sql, "Null", parameters)
        return Read(found.storage_rows_read(), found.storage_bytes_read())


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Long]:
    with TableDirectory(tmp_path_factory.mktemp("long") / "w", memory_mb=2048) as store:
        make_tables(store)
        store.run("SYSTEM STOP MERGES")  # as much is read whenever the test runs
        fill(store, STEPS)
        scan = read(store, "SELECT sum(cityHash64(*)) FROM millrace_log.events", {})
        found = {name: read(store, sql, parameters) for name, (sql, parameters) in asked(store).items()}
        for name, each in found.items():
            print(f"{name}: {each.size / scan.size:.4f} of a scan, {each.rows} rows")
        yield Long(scan, found)


def test_a_scan_reads_every_row_and_every_question_reads_some(history: Long) -> None:
    assert history.scan.rows == STEPS
    assert history.questions.keys() >= questions().keys()
    assert all(each.size > 0 for each in history.questions.values())


def test_no_question_reads_more_than_its_share(history: Long) -> None:
    limits = {name: LIMITS.get(name, AGGREGATE if name in AGGREGATES else ANY) for name in history.questions}
    shares = {name: each.size / history.scan.size for name, each in history.questions.items()}
    assert {name: share for name, share in shares.items() if share > limits[name]} == {}


def test_a_trajectory_is_found_without_reading_the_others(history: Long) -> None:
    """However long the history is, each part of a table costs a few granules."""
    parts = -(-STEPS // CHUNK)
    assert history.questions["trajectory"].rows <= parts * SEARCHED * GRANULE < parts * CHUNK
