"""Asking a server that is named by a URL: the limits it is told, and what a URL may hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.consumers.warehouse.asking import open_asking
from millrace.consumers.warehouse.endpoint.faults import QueryError
from millrace.consumers.warehouse.server import Server
from millrace.infra.config import Settings
from tests.support.asked_tables import KEY, ROWS, answering
from tests.support.clickhouse_server import clickhouse_server


def test_a_server_by_url_is_told_the_limits_of_a_query(tmp_path: Path) -> None:
    with answering(tmp_path) as url:
        known = url.replace("//", f"//millrace:{KEY}@")
        config = Settings(home=tmp_path, warehouse={"url": known, "query_seconds": 0.5, "query_rows": 5})
        with open_asking(config) as asking:
            limits = "getSetting('max_execution_time'), getSetting('max_result_rows'), getSetting('max_memory_usage')"
            assert list(asking.table(f"SELECT {limits}").to_pylist()[0].values()) == [1, 5, 512 << 20]
            with pytest.raises(QueryError, match="query_rows"):
                list(asking.ask("SELECT off FROM steps"))


def test_whoever_asks_is_the_reader_where_there_is_one(tmp_path: Path) -> None:
    with answering(tmp_path) as url:
        reader = url.replace("//", f"//millrace:{KEY}@")
        for nobody, wanted in ((url.replace("//", "//millrace:wrong@"), reader), (reader, "")):
            config = Settings(home=tmp_path, warehouse={"url": nobody, "read_url": wanted})
            with open_asking(config) as asking:
                assert asking.table("SELECT count() AS n FROM steps").to_pylist() == [{"n": ROWS}]


def test_a_password_in_a_url_may_hold_any_sign(tmp_path: Path) -> None:
    with clickhouse_server(tmp_path, password="p@ss/w%rd:?") as url:
        with Server(url) as server:
            server.prepare()
        with open_asking(Settings(home=tmp_path, warehouse={"url": url})) as asking:
            assert asking.table("SELECT 1 AS a").to_pylist() == [{"a": 1}]
