"""The server's code path over HTTP without a server: the endpoint in its test mode, which takes inserts."""

from pathlib import Path

import pytest

from millrace.consumers.warehouse.server import Server
from millrace.infra.errors import WarehouseError
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
