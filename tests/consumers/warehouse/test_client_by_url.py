"""Asking a server that is named by a URL: what is refused before it is sent, the limits it is told, and what a URL may
hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from millrace.consumers.warehouse.client import Asking, open_asking
from millrace.consumers.warehouse.endpoint.faults import QueryError
from millrace.consumers.warehouse.store.server import Server
from millrace.infra.config import Settings
from tests.consumers.warehouse.attacks import ATTACKS, SERVED, written
from tests.support.asked_tables import CANARY, KEY, ROWS, answering, fill
from tests.support.clickhouse_server import clickhouse_server
from tests.support.stores import SERVERS, server_url

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class ByUrl(NamedTuple):
    """Who asks a server that knows no guard, what writes to it, and a folder with a file that nobody may read."""

    asking: Asking
    server: Server
    folder: Path


# One process opens one set of tables at a time: these come before those that share theirs.


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


@pytest.fixture(scope="module", params=SERVERS)
def by_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ByUrl]:
    folder = tmp_path_factory.mktemp("by_url")
    (folder / "canary").write_text(CANARY)
    with server_url(request.param, folder / "tables") as url, Server(url) as server:
        server.prepare()
        fill(server)
        with open_asking(Settings(home=folder / "home", warehouse={"url": url})) as asking:
            yield ByUrl(asking, server, folder)


def test_the_server_itself_would_answer(by_url: ByUrl) -> None:
    """So what is refused below is refused before it is sent."""
    read = f"SELECT * FROM file('{by_url.folder}/canary', 'LineAsString')"
    assert by_url.server.rows("SELECT a FROM others.secret") == [(CANARY,)]
    if "127.0.0.1" in by_url.server.where:
        assert by_url.server.rows(read) == [(CANARY,)]


def test_no_attack_reaches_a_server(by_url: ByUrl) -> None:
    answered = []
    for attack in ATTACKS:
        with suppress(QueryError):
            answered.append((attack, b"".join(by_url.asking.ask(written(attack, by_url.folder)))))
    assert answered == []
    assert sorted(path.name for path in by_url.folder.iterdir()) == ["canary", "tables"]
    assert by_url.server.rows("SELECT count() FROM millrace_log.places") == [(ROWS,)]


@pytest.mark.parametrize("sql", SERVED)
def test_a_server_gets_what_people_ask(by_url: ByUrl, sql: str) -> None:
    list(by_url.asking.ask(sql))
