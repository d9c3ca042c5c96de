"""Ingest goes on while eight clients ask the endpoint: every record becomes a row, and an answer holds whole blocks."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path

import pytest

from millrace.consumers.warehouse.client import OverHttp
from millrace.consumers.warehouse.endpoint.serve import open_endpoint
from millrace.consumers.warehouse.ingest import blocks as cutting
from millrace.consumers.warehouse.ingest.ingest import Ingest
from millrace.consumers.warehouse.store.directory import TableDirectory
from millrace.consumers.warehouse.store.migrations import migrate
from millrace.consumers.warehouse.store.tables import TABLES
from millrace.infra import faults
from millrace.infra.config import Settings
from millrace.infra.local_keys import warehouse_key
from millrace.infra.process.net import free_ports
from tests.support.history import History
from tests.support.history_log import NS

READERS = 8
SPAN = 8
PATIENCE_S = 300
Place = tuple[str, int]
SEEN = "SELECT topic, part, count() AS rows, max(off) AS last FROM millrace_log.events GROUP BY topic, part"
ROWS = "SELECT topic, part, off FROM millrace_log.{}"

pytestmark = pytest.mark.slow


def test_all_rows_arrive_under_eight_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "SPAN", SPAN)
    made = History(3, versions=2)
    config = Settings(home=tmp_path, warehouse={"port": free_ports(1)[0]})
    over, failed = threading.Event(), list[Exception]()
    asked, answers = [0] * READERS, list[tuple[Place, int, int]]()

    def read(which: int, url: str) -> None:
        try:
            with OverHttp(url, "millrace", warehouse_key(config), PATIENCE_S, {}) as asking:
                while not over.is_set():
                    rows = asking.table(SEEN).to_pylist()
                    answers.extend(((row["topic"], row["part"]), row["rows"], row["last"]) for row in rows)
                    asked[which] += 1
        except Exception as error:
            failed.append(error)

    def slowly(name: str) -> None:
        """Each reader has asked anew since the last insert of a few."""
        nonlocal inserts
        inserts += name == "warehouse.after_insert"
        if name == "warehouse.after_insert" and inserts % 10 == 1:
            then, until = list(asked), time.monotonic() + PATIENCE_S
            while not failed and any(now == was for now, was in zip(asked, then, strict=True)):
                assert time.monotonic() < until
                time.sleep(0.005)

    inserts = 0
    with TableDirectory(tmp_path / "tables", memory_mb=512) as store:
        migrate(store)
        serving = open_endpoint(store.handle, config)
        readers = [threading.Thread(target=read, args=(at, serving.url)) for at in range(READERS)]
        for reader in readers:
            reader.start()
        before = faults.install(slowly)
        try:
            Ingest(made.bus, store, NS, lambda data: data).catch_up()
        finally:
            faults.install(before)
            over.set()
            for reader in readers:
                reader.join()
            serving.close()
        assert failed == []
        offsets: dict[Place, list[int]] = defaultdict(list)
        for topic, part, off in store.rows(f"{ROWS.format('events')} ORDER BY off"):
            offsets[topic, part].append(off)
        tables = [table.name for table in TABLES] + ["unreadable"]
        rows = store.rows(" UNION ALL ".join(map(ROWS.format, tables)))
    topic = made.topic("events")
    written = [
        (topic, part, r.offset) for part in range(made.bus.partitions(topic)) for r in made.bus.read(topic, part)
    ]
    assert sorted(row for row in rows if row[0] == topic) == sorted(written)
    assert any(seen < len(offsets[place]) for place, seen, _ in answers), "somebody asked while rows came"
    for place, seen, last in set(answers):
        there = offsets[place]
        assert seen == bisect_right(there, last), "all that is before the last row is there"
        assert there[seen - 1] == last
        assert seen == len(there) or there[seen] // SPAN > last // SPAN, "the last row ends a block"
