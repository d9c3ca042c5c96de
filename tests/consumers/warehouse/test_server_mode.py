"""The server's code path over HTTP without a server: the endpoint in its test mode, which takes inserts."""

from pathlib import Path

import pytest

from millrace.consumers.warehouse.asking import open_asking
from millrace.consumers.warehouse.endpoint.faults import QueryError
from millrace.consumers.warehouse.server import Server
from millrace.infra.config import Settings
from millrace.infra.errors import WarehouseError
from tests.support.asked_tables import KEY, answering
from tests.support.clickhouse_server import clickhouse_server


def test_a_server_takes_tables_and_rows(tmp_path: Path) -> None:
    """The server's code path, over HTTP, without a server."""
    with clickhouse_server(tmp_path / "tables") as url, Server(url) as server:
        server.prepare()
        server.run("CREATE TABLE millrace_log.t (a UInt8, b String) ENGINE = MergeTree ORDER BY a")
        with server.client("millrace_log") as client:
            client.insert("t", [[1, "x"], [2, "it's"]], column_names=["a", "b"])
            client.raw_insert("t", ["a", "b"], insert_block=b"3,y\n", fmt="CSV")
        assert server.rows("SELECT a, b FROM t ORDER BY a") == [(1, "x"), (2, "it's"), (3, "y")]
        with pytest.raises(WarehouseError, match="UNKNOWN_TABLE") as refused:
            server.run("DROP TABLE millrace_log.nowhere")
        assert refused.value.code == 60


def test_a_server_by_url_is_told_the_limits_of_a_query(tmp_path: Path) -> None:
    with answering(tmp_path) as url:
        known = url.replace("//", f"//millrace:{KEY}@")
        config = Settings(home=tmp_path, warehouse={"url": known, "query_seconds": 0.5, "query_rows": 5})
        with open_asking(config) as asking:
            limits = "getSetting('max_execution_time'), getSetting('max_result_rows'), getSetting('max_memory_usage')"
            assert list(asking.table(f"SELECT {limits}").to_pylist()[0].values()) == [1, 5, 512 << 20]
            with pytest.raises(QueryError, match="query_rows"):
                list(asking.ask("SELECT off FROM steps"))


def test_a_password_in_a_url_may_hold_any_sign(tmp_path: Path) -> None:
    with clickhouse_server(tmp_path, password="p@ss/w%rd:?") as url:
        with Server(url) as server:
            server.prepare()
        with open_asking(Settings(home=tmp_path, warehouse={"url": url})) as asking:
            assert asking.table("SELECT 1 AS a").to_pylist() == [{"a": 1}]
