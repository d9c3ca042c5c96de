"""Clients of other languages, by the requests that they were seen to make: JDBC (clickhouse-jdbc 0.11.0, with
compress=0 in its URL) and Go (clickhouse-go 2.50.0), which Grafana's data source uses for protocol HTTP."""

from __future__ import annotations

import gzip
from collections.abc import Iterator

import httpx
import pytest

from millrace.consumers.warehouse.endpoint.native import INFO
from millrace.consumers.warehouse.endpoint.query import varint
from tests.support.asked_tables import KEY, ROWS, answering

pytestmark = pytest.mark.slow

JDBC_AGENT = "jdbc-v2/0.11.0 clickhouse-java-v2/0.11.0 (lv:java/17.0.15; os:Linux; hc:ahc_5.6.4)"
GO_AGENT = "clickhouse-go/2.50.0 (lv:go/1.26.8; os:linux)"
GO_PARAMS = {"client_protocol_version": "54460", "database": "millrace", "default_format": "Native"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with answering(tmp_path_factory.mktemp("clients")) as found:
        yield found


def jdbc(url: str, sql: str, **params: str) -> httpx.Response:
    """A query as JDBC sends it."""
    headers = {
        "Content-Type": "text/plain",
        "X-ClickHouse-Format": "RowBinaryWithNamesAndTypes",
        "X-ClickHouse-Query-Id": "b5b2ff90-c60b-4ee8-9446-f23787b73487",
        "X-ClickHouse-Database": "millrace",
        "User-Agent": JDBC_AGENT,
    }
    return httpx.post(url, params=params, content=sql, headers=headers, auth=("millrace", KEY))


def go(url: str, sql: str, **params: str) -> bytes:
    """The answer to a query as Go sends it, with gzip, as Grafana wishes it."""
    headers = {"User-Agent": GO_AGENT, "Accept-Encoding": "gzip"}
    request = httpx.Request("POST", url, params=GO_PARAMS | params, content=sql, headers=headers)
    with (
        httpx.Client(auth=("millrace", KEY)) as client,
        client.stream("POST", request.url, content=sql, headers=headers) as said,
    ):
        assert said.status_code == 200
        return gzip.decompress(b"".join(said.iter_raw()))


def named(*texts: str) -> bytes:
    """Texts as both formats write them."""
    return b"".join(varint(len(text.encode())) + text.encode() for text in texts)


def test_jdbc_learns_the_version_when_it_connects(url: str) -> None:
    found = jdbc(url, "SELECT version() as server_version", wait_end_of_query="1")
    version = httpx.get(url, params={"query": "SELECT version()"}, auth=("millrace", KEY)).text.strip()
    assert found.content == b"\x01" + named("server_version", "String", version)


def test_jdbc_reads_rows_with_names_and_types(url: str) -> None:
    found = jdbc(url, "SELECT off, name FROM steps WHERE off = 7 AND name = '7'", query_id="q", max_execution_time="5")
    assert found.content == b"\x02" + named("off", "name", "UInt64", "String") + (7).to_bytes(8, "little") + named("7")
    assert found.headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize(
    "sql",
    [
        "SHOW DATABASES LIKE 'millrace'",
        "SHOW FULL TABLES FROM `millrace` LIKE '%'",
        "DESCRIBE TABLE `millrace`.`steps`",
        "SELECT 'local' AS TABLE_CAT  WHERE 1 = 0",
        "SELECT name AS TYPE_NAME, CAST(0 as Int32) AS DATA_TYPE FROM system.data_type_families",
    ],
)
def test_tools_over_jdbc_list_what_there_is(url: str, sql: str) -> None:
    found = jdbc(url, sql)
    assert found.status_code == 200
    assert found.content


def test_jdbc_without_compress_0_is_told_of_it(url: str) -> None:
    found = jdbc(url, "SELECT version() as server_version", compress="1", wait_end_of_query="1")
    assert (found.status_code, found.headers["x-clickhouse-exception-code"]) == (501, "48")
    assert "?compress=0" in found.text


def test_go_learns_whom_it_speaks_to_when_it_connects(url: str) -> None:
    found = go(url, "SELECT displayName(), version(), revision(), timezone()")
    assert found.startswith(INFO + b"\x04\x01" + named("displayName()", "String") + b"\x00")
    assert named("version()", "String") + b"\x00" in found


def test_go_reads_blocks_of_its_protocol(url: str) -> None:
    found = go(url, "SELECT off, name, [1,2]::Array(UInt32) FROM steps ORDER BY off LIMIT 2", param_a="it's")
    numbers = b"".join(number.to_bytes(8, "little") for number in (0, 1))
    assert found.startswith(INFO + b"\x03\x02" + named("off", "UInt64") + b"\x00" + numbers)
    assert named("name", "String") + b"\x00" + named("0", "1") in found


def test_go_reads_many_blocks_and_none(url: str) -> None:
    found = go(url, "SELECT off FROM millrace_log.places")
    assert found.count(INFO + b"\x01") > 1
    assert len(found) > 8 * ROWS
    assert go(url, "SELECT off FROM steps WHERE 0") == INFO + b"\x01\x00" + named("off", "UInt64") + b"\x00"


def test_grafana_may_limit_rows_and_time(url: str) -> None:
    found = go(url, "SELECT off FROM steps ORDER BY off", limit="3", max_execution_time="60")
    assert found.startswith(INFO + b"\x01\x03")


def test_go_with_frames_of_lz4_is_told_what_to_choose(url: str) -> None:
    params = GO_PARAMS | {"compress": "1", "network_compression_method": "LZ4"}
    found = httpx.post(url, params=params, content="SELECT 1", auth=("millrace", KEY))
    assert found.status_code == 501
    assert "gzip or no compression" in found.text
