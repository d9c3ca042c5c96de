"""The endpoint as stock clients see it: clickhouse-connect, @clickhouse/client, and plain HTTP as curl sends it."""

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import clickhouse_connect
import cramjam
import httpx
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError

from millrace.consumers.warehouse.endpoint import app
from millrace.consumers.warehouse.endpoint.app import AT_ONCE, media_type, with_error
from millrace.consumers.warehouse.endpoint.faults import QueryError
from tests.support.asked_tables import KEY, ROWS, answering

pytestmark = pytest.mark.slow

FAILS_LATE = "SELECT number, throwIf(number = 2000000) FROM numbers(3000000)"
SLOWLY = {"max_threads": "1", "max_block_size": "1000"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with answering(tmp_path_factory.mktemp("http")) as found:
        yield found
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{found}/ping")


def post(url: str, sql: str | bytes, params: dict[str, str] | None = None, **headers: str) -> httpx.Response:
    """A query as curl sends it."""
    return httpx.post(url, params=params, content=sql, auth=("millrace", KEY), headers=headers, timeout=60)


def client(url: str, **more: Any) -> Any:
    """clickhouse-connect."""
    host, _, port = url.removeprefix("http://").partition(":")
    return clickhouse_connect.get_client(
        host=host, port=int(port), username="millrace", password=KEY, database="millrace", **more
    )


@pytest.mark.parametrize("compress", [False, True, "gzip", "deflate", "lz4", "zstd"])
def test_clickhouse_connect_reads(url: str, compress: bool | str) -> None:
    with client(url, compress=compress) as asks:
        assert asks.ping()
        assert asks.query("SELECT off, name FROM steps ORDER BY off LIMIT 2").result_rows == [(0, "0"), (1, "1")]
        assert asks.query_arrow("SELECT * FROM steps LIMIT 3").num_rows == 3
        values = {"a": "it's\n\t\\ \u2028", "b": [1, 2], "c": None}
        found = asks.query("SELECT {a:String}, {b:Array(UInt8)}, {c:Nullable(String)}", parameters=values)
        assert found.result_rows == [("it's\n\t\\ \u2028", [1, 2], None)]
        with asks.query_row_block_stream("SELECT off FROM millrace_log.places") as blocks:
            assert sum(len(block) for block in blocks) == ROWS
        assert asks.command("SELECT 5") == 5
        assert asks.query("SELECT off, name FROM steps WHERE 0").column_names == ("off", "name")
        assert asks.query("SELECT off FROM steps LIMIT 0").column_names == ("off",)
        assert asks.query("DESCRIBE steps").result_rows[0][:2] == ("off", "UInt64")
        assert asks.raw_query("SELECT 1", fmt="CSV") == b"1\n"


def test_clickhouse_connect_is_told_of_errors(url: str) -> None:
    with client(url) as asks:
        with pytest.raises(DatabaseError, match="UNKNOWN_TABLE"):
            asks.query("SELECT 1 FROM nowhere")
        with pytest.raises(DatabaseError, match="read-only"):
            asks.command("INSERT INTO steps VALUES (1, '')")
        with pytest.raises(DatabaseError):
            asks.insert("places", [[1, "", []]], database="millrace_log")
        assert asks.query("SELECT 1").result_rows == [(1,)]
    with pytest.raises(DatabaseError, match="AUTHENTICATION_FAILED"):
        clickhouse_connect.get_client(dsn=url.replace("http://", "http://millrace:wrong@"))


def test_a_late_error_stands_in_the_body_as_clients_look_for_it(url: str) -> None:
    found = post(url, FAILS_LATE, SLOWLY)
    tag = found.headers["x-clickhouse-exception-tag"]
    assert found.status_code == 200
    rows, _, rest = found.text.partition(f"\r\n__exception__\r\n{tag}\r\n")
    assert rows.splitlines()[:2] == ["0\t0", "1\t0"]
    said, _, end = rest.rpartition("\n")[0].rpartition("\n")[0].rpartition("\n")
    assert said.startswith("Code: 395. DB::Exception: ")
    assert int(end.split()[0]) == len(said) + 1
    assert end.split()[1].strip() == tag
    assert post(url, FAILS_LATE, {**SLOWLY, "wait_end_of_query": "1"}).headers["x-clickhouse-exception-code"] == "395"


def test_a_late_error_reaches_clickhouse_connect(url: str) -> None:
    """The client sends no settings to a readonly server by itself, so the URL brings them."""
    with client(url) as asks:
        asks.params.update(SLOWLY)
        with pytest.raises(DatabaseError, match="throwIf"):
            asks.query(FAILS_LATE)


def test_marked_errors_count_their_bytes() -> None:
    def failing() -> Iterator[bytes]:
        yield b"rows"
        raise QueryError("nö.", 1)

    out = b"".join(with_error(failing(), "tag", "v"))
    said = "Code: 1. DB::Exception: nö. (UNKNOWN_EXCEPTION) (version v)".encode()
    assert out == b"rows\r\n__exception__\r\ntag\r\n" + said + b"\n%d tag\r\n__exception__\r\n" % (len(said) + 1)


@pytest.mark.parametrize("path", ["/ping", "/replicas_status"])
def test_health_needs_no_key(url: str, path: str) -> None:
    found = httpx.get(url + path)
    assert (found.status_code, found.text) == (200, "Ok.\n")


def test_plain_http(url: str) -> None:
    assert httpx.get(url, params={"query": "SELECT 1", "user": "millrace", "password": KEY}).text == "1\n"
    assert httpx.get(url, auth=("millrace", KEY)).text == "Ok.\n"
    found = post(url, "SELECT 1 AS a FORMAT JSON", {"query_id": "mine", "session_id": "s"})
    assert found.json()["data"] == [{"a": 1}]
    assert found.headers["content-type"] == "application/json; charset=UTF-8"
    assert found.headers["x-clickhouse-query-id"] == "mine"
    assert found.headers["x-clickhouse-format"] == "JSON"
    assert json.loads(found.headers["x-clickhouse-summary"])["read_rows"] == "1"
    assert post(url, "SELECT 1 AS a", {"default_format": "CSVWithNames"}).text == '"a"\n1\n'
    assert post(url, "SELECT 1 AS a", **{"X-ClickHouse-Format": "JSONEachRow"}).text == '{"a":1}\n'
    assert post(url, "SELECT count() FROM places", {"database": "millrace_log"}).text == f"{ROWS}\n"
    lz4 = post(url, "SELECT 1", **{"Accept-Encoding": "lz4"})
    assert bytes(cramjam.lz4.decompress(lz4.content)) == b"1\n"
    assert post(url, "SELECT 1", {"query_id": "a\r\nb"}).headers["x-clickhouse-query-id"] != "a\r\nb"


@pytest.mark.parametrize(
    ("sql", "status", "code"),
    [
        ("SELEC 1", 400, 62),
        ("SELECT a", 404, 47),
        ("SELECT 1 FROM nowhere", 404, 60),
        ("SELECT toUInt8('x')", 400, 6),
        ("SELECT file('x')", 403, 497),
        ("SET readonly = 0", 403, 164),
        (b"SELECT '\xff'", 400, 36),
        ("SELECT 1 FORMAT Nonsense", 404, 73),
        ("SELECT {a:String}", 400, 456),
        ("SELECT '" + "x" * (300 << 10) + "'", 413, 1010),
    ],
)
def test_errors_have_a_servers_form(url: str, sql: str | bytes, status: int, code: int) -> None:
    found = post(url, sql)
    assert (found.status_code, found.headers["x-clickhouse-exception-code"]) == (status, str(code))
    assert found.text.startswith(f"Code: {code}. DB::Exception: ")
    assert found.text.endswith(")\n")


def test_who_may_not_ask(url: str) -> None:
    assert httpx.post(url, content="SELECT 1").status_code == 401
    assert httpx.post(url, content="SELECT 1", auth=("millrace", "wrong")).status_code == 403
    assert post(url, "SELECT 1", Host="evil.example").status_code == 403
    assert post(url, "SELECT 1", Origin="http://evil.example").status_code == 403
    assert httpx.get(f"{url}/ping", headers={"Host": "evil.example"}).status_code == 403
    assert httpx.put(url, content="SELECT 1", auth=("millrace", KEY)).status_code == 405
    assert httpx.get(f"{url}/play", auth=("millrace", KEY)).status_code == 404


def test_clients_that_go_away_leave_room_for_others(url: str) -> None:
    """More of them than queries may run at a time, each gone before its answer was taken."""
    host, _, port = url.removeprefix("http://").partition(":")
    body = b"SELECT number FROM numbers(10000000)"
    head = f"POST /?user=millrace&password={KEY} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(3 * AT_ONCE):
        with socket.create_connection((host, int(port))) as one:
            one.sendall(head.encode() + body)
            assert one.recv(12) == b"HTTP/1.1 200"
    assert post(url, "SELECT 1").text == "1\n"


@pytest.mark.parametrize(
    "head",
    [
        "GET / HTTP/1.1\r\nHost: {host}\r\nX-A: " + "a" * (128 << 10) + "\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: {host}\r\n" + "X-A: a\r\n" * 5000 + "\r\n",
        "GET /?query=" + "1" * (128 << 10) + " HTTP/1.1\r\nHost: {host}\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n12345",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
        "nonsense\r\n\r\n",
    ],
    ids=["a long header", "many headers", "a long URL", "two lengths", "two other lengths", "HTTP/2", "nonsense"],
)
def test_requests_that_are_no_requests_get_no_answer_of_a_query(url: str, head: str) -> None:
    """Refused, or cut off; and the endpoint serves on."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as one:
        with suppress(ConnectionError):
            one.sendall(head.format(host=host).encode())
        with suppress(ConnectionError):
            answer = one.recv(4096)
            assert not answer.startswith(b"HTTP/1.1 200")
            assert not answer.startswith(b"\0"), "frames of HTTP/2"
    assert post(url, "SELECT 1").text == "1\n"


def test_a_query_that_does_not_come_is_not_waited_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_S", 0.1)
    host, _, port = url.removeprefix("http://").partition(":")
    head = f"POST /?user=millrace&password={KEY} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 8\r\n\r\nSEL"
    with socket.create_connection((host, int(port)), timeout=60) as one:
        one.sendall(head.encode())
        assert one.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_types_of_media() -> None:
    assert media_type("JSONCompact").startswith("application/json")
    assert media_type("JSONEachRow").startswith("application/x-ndjson")
    assert media_type("Native") == "application/octet-stream"
    assert "header=present" in media_type("CSVWithNames")
    assert media_type("Vertical").startswith("text/plain")


SCRIPT = """
import { createClient } from '@clickhouse/client'
const [url, key, compressed] = process.argv.slice(2)
const off = { level: 127 }
const asks = createClient({ url, username: 'millrace', password: key, database: 'millrace', log: off,
  compression: { response: compressed === 'yes', request: false } })
const out = {}
out.ping = (await asks.ping()).success
out.rows = await (await asks.query({ query: 'SELECT off, name FROM steps ORDER BY off LIMIT 2',
  format: 'JSONEachRow' })).json()
out.params = await (await asks.query({ query: 'SELECT {a: String} AS a, {b: Array(UInt32)} AS b',
  query_params: { a: "it's\\n", b: [1, 2] }, format: 'JSONEachRow' })).json()
out.streamed = 0
const stream = (await asks.query({ query: 'SELECT * FROM millrace_log.places', format: 'CSV' })).stream()
for await (const rows of stream) out.streamed += rows.length
try { await asks.query({ query: 'SELECT 1 FROM nowhere' }) } catch (error) { out.error = [error.code, error.type] }
try { await asks.insert({ table: 'steps', values: [{ off: 1 }], format: 'JSONEachRow' }) }
catch (error) { out.insert = [error.code, error.type] }
await asks.close()
console.log(JSON.stringify(out))
"""


@pytest.mark.slow
@pytest.mark.parametrize("compressed", ["yes", "no"])
def test_the_client_for_node_reads(url: str, compressed: str, node_client: Path) -> None:
    (node_client / "ask.mjs").write_text(SCRIPT)
    ran = subprocess.run(
        ["node", "ask.mjs", url, KEY, compressed],
        cwd=node_client,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "ping": True,
        "rows": [{"off": 0, "name": "0"}, {"off": 1, "name": "1"}],
        "params": [{"a": "it's\n", "b": [1, 2]}],
        "streamed": ROWS,
        "error": ["60", "UNKNOWN_TABLE"],
        "insert": ["164", "READONLY"],
    }


@pytest.fixture(scope="module")
def node_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with @clickhouse/client."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed here")
    folder = tmp_path_factory.mktemp("node")
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "@clickhouse/client@1"]
    try:
        got = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("the registry of npm does not answer")
    if got.returncode:
        pytest.skip(f"npm gets no @clickhouse/client here: {got.stderr.strip()[-200:]}")
    return folder
