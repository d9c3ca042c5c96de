"""The server's code path over HTTP without a server: the endpoint in its test mode, which takes inserts. Several
processes on it: what the model in test_fences shows of the protocol, shown of the statements."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.consumers.warehouse.ingest import blocks as cutting
from millrace.consumers.warehouse.ingest.ingest import Ingest
from millrace.consumers.warehouse.ingest.shares import GroupShares, group_of
from millrace.consumers.warehouse.rebuild import alone, rebuild_from
from millrace.consumers.warehouse.store import fences
from millrace.consumers.warehouse.store.base import Insertion
from millrace.consumers.warehouse.store.migrations import migrate
from millrace.consumers.warehouse.store.server import Server
from millrace.consumers.warehouse.store.tables import LOG
from millrace.infra.config import Settings
from millrace.infra.errors import WarehouseError, WarehouseTaken
from tests.support.history import History
from tests.support.history_log import NS
from tests.support.stores import SERVERS, server_url
from tests.support.warehouse import Digests, differing, digests, world

PATIENCE_S = 120
_BEHIND = re.compile(r"millrace-test\.[\w.]+-\d+-(?!unreadable)\w+-[1-9]\d*-")
"""the id of an insert whose first row is not the first of its partition"""


class Interrupted(Server):
    """A process's way to the server. `during` is called at its nth insert of rows, with what would send it."""

    def __init__(self, url: str, nth: int, during: Callable[[Callable[[Insertion], None], Insertion], None]) -> None:
        super().__init__(url)
        self._left, self._during = nth, during

    def insert(self, into: Insertion, data: Sequence[bytes], query_id: str) -> None:
        self._left -= 1
        if self._left:
            super().insert(into, data, query_id)
        else:
            send = super().insert
            self._during(lambda changed: send(changed, data, query_id), into)


@pytest.fixture(scope="module", params=SERVERS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server_url(request.param, tmp_path_factory.mktemp("server") / "tables") as found:
        yield found


@pytest.fixture
def server(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """An empty one, with every table, and many blocks."""
    monkeypatch.setattr(cutting, "SPAN", 64)
    with Server(url) as found:
        found.run(f"DROP DATABASE IF EXISTS {LOG} SYNC")
        migrate(found)
        yield found


@pytest.fixture(scope="module")
def made() -> History:
    return world(5, versions=1)


def load(store: Server, made: History) -> Digests:
    Ingest(made.bus, store, NS, lambda data: data).catch_up()
    return digests(store)


def emptied(store: Server) -> None:
    store.run(f"DROP DATABASE {LOG} SYNC")
    migrate(store)


def test_a_server_takes_tables_and_rows(server: Server) -> None:
    """The server's code path, over HTTP, without a server."""
    server.run(f"CREATE TABLE {LOG}.t (a UInt8, b String) ENGINE = MergeTree ORDER BY a")
    with server.client(LOG) as client:
        client.insert("t", [[1, "x"], [2, "it's"]], column_names=["a", "b"])
        client.raw_insert("t", ["a", "b"], insert_block=b"3,y\n", fmt="CSV")
    assert server.rows("SELECT a, b FROM t ORDER BY a") == [(1, "x"), (2, "it's"), (3, "y")]
    with pytest.raises(WarehouseError, match="UNKNOWN_TABLE") as refused:
        server.run(f"DROP TABLE {LOG}.nowhere")
    assert refused.value.code == 60


@pytest.mark.slow
def test_an_insert_that_comes_late_is_refused(server: Server, url: str, made: History) -> None:
    """Its process was paused before it sent it, and another one has brought in the same rows meanwhile."""
    clean = load(server, made)
    emptied(server)

    def late(send: Callable[[Insertion], None], into: Insertion) -> None:
        assert differing(clean, load(server, made)) == []
        send(into)

    zombie = Interrupted(url, 5, late)
    with pytest.raises(WarehouseTaken):
        load(zombie, made)
    assert differing(clean, digests(server)) == []
    assert load(zombie, made) == clean, "it takes over again, and has nothing to do"


class Watched(Server):
    """The way of a rebuild to the server. `acts`: what is done before its first statement that begins so."""

    def __init__(self, url: str, acts: dict[str, Callable[[], None]]) -> None:
        super().__init__(url)
        self._acts = acts

    def run(self, sql: str, database: str = "default") -> None:
        for beginning in [each for each in self._acts if sql.startswith(each)]:
            self._acts.pop(beginning)()
        super().run(sql, database)


def inserts(server: Server, url: str, made: History) -> tuple[Digests, int, int]:
    """A clean load, then empty tables: its digests, which of its inserts is the first of rows behind others of their
    partition, and how many there are."""
    ids: list[str] = []

    class Listed(Server):
        def insert(self, into: Insertion, data: Sequence[bytes], query_id: str) -> None:
            ids.append(query_id)
            super().insert(into, data, query_id)

    with Listed(url) as listed:
        clean = load(listed, made)
    emptied(server)
    behind = next(n for n, name in enumerate(ids, 1) if _BEHIND.match(name))
    return clean, behind, len(ids)


FOR_LONG: dict[str, Any] = {"topics": {"short_hours": 876_000}, "warehouse": {"keep_days": 36_500}}
"""rows are forgotten in time, so that `blocks` is believed"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["DROP TABLE", "ALTER TABLE"])
@pytest.mark.parametrize("what", ["rows", "proofs"])
def test_a_process_that_wakes_while_tables_are_made_anew_is_refused(
    server: Server, url: str, made: History, tmp_path: Path, what: str, moment: str
) -> None:
    """It slept for so long that the group has forgotten it; what it sends lies behind a hole, or proves rows that are
    gone."""
    clean, behind, count = inserts(server, url, made)
    refused: list[str] = []

    def meanwhile(send: Callable[[Insertion], None], into: Insertion) -> None:
        def wakes() -> None:
            with pytest.raises(WarehouseTaken):
                send(into)
            refused.append(into.table)

        settings = Settings(home=tmp_path, namespace=NS, **FOR_LONG)
        with Watched(url, {moment: wakes}) as store:
            rebuild_from(made.bus, store, settings, lambda data: data)
        raise WarehouseError("killed")

    with pytest.raises(WarehouseError, match="killed"):
        load(Interrupted(url, behind if what == "rows" else count, meanwhile), made)
    assert [name == f"{LOG}.blocks" for name in refused] == [what == "proofs"]
    assert differing(clean, digests(server)) == []
    assert load(server, made) == clean


@pytest.mark.slow
def test_a_process_that_begins_while_tables_are_made_anew_leaves_no_hole(
    server: Server, url: str, made: History, tmp_path: Path
) -> None:
    """It takes over after the rebuild did, and asks how far the tables are before they are dropped."""
    clean, behind, _ = inserts(server, url, made)
    waits, goes_on, wrote = threading.Event(), threading.Event(), threading.Event()

    def slowly(send: Callable[[Insertion], None], into: Insertion) -> None:
        waits.set()
        assert goes_on.wait(PATIENCE_S)
        try:
            send(into)
        finally:
            wrote.set()
        raise WarehouseError("killed")

    def newcomer() -> None:
        with suppress(WarehouseError):
            load(Interrupted(url, behind, slowly), made)

    thread = threading.Thread(target=newcomer)

    def begins() -> None:
        thread.start()
        assert waits.wait(PATIENCE_S)

    def writes() -> None:
        goes_on.set()
        assert wrote.wait(PATIENCE_S)
        rows = sum(count for count, _ in digests(server).values())
        assert rows > 0, "it was let through"

    settings = Settings(home=tmp_path, namespace=NS, **FOR_LONG)
    with Watched(url, {"DROP TABLE": begins, "ALTER TABLE": writes}) as store:
        rebuild_from(made.bus, store, settings, lambda data: data)
    thread.join()
    assert differing(clean, digests(server)) == []


@pytest.mark.slow
def test_former_holders_are_forgotten_and_the_newest_is_not(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fences, "MANY", 4)
    places = [("it's.events", 0), ("it's.events", 1), ("other", 0)]
    for number in range(10):
        fences.take_over(server, f"holder-{number}", places[: 1 + number % 3])
    newest = "SELECT topic, part, argMax(holder, (epoch, holder)) FROM {}.fences GROUP BY ALL ORDER BY ALL"
    held = [(topic, part, f"holder-{number}") for (topic, part), number in zip(places, (9, 8, 8), strict=True)]
    running = f"SELECT count() FROM system.mutations WHERE database = '{LOG}' AND NOT is_done"
    until = time.monotonic() + PATIENCE_S
    while server.rows(running) != [(0,)]:
        assert server.rows(newest.format(LOG)) == held, "also while it is being done"
        assert time.monotonic() < until
    assert server.rows(newest.format(LOG)) == held
    counts = server.rows(f"SELECT count() FROM {LOG}.fences GROUP BY topic, part")
    assert max(count for (count,) in counts) <= 5


def test_an_insert_that_still_runs_is_waited_for(server: Server, url: str, made: History) -> None:
    """It asked for its fence before another process took over, and its rows come after that: they are counted."""
    clean = load(server, made)
    emptied(server)
    ended: list[float] = []

    def slowly(send: Callable[[Insertion], None], into: Insertion) -> None:
        thread = threading.Thread(target=send, args=(replace(into, where=f"{into.where} AND sleep(3) = 0"),))
        thread.start()
        running = f"SELECT 1 FROM system.processes WHERE startsWith(Settings['log_comment'], 'millrace-{NS}.')"
        until = time.monotonic() + PATIENCE_S
        while not server.rows(running):
            assert time.monotonic() < until
            time.sleep(0.02)
        server.settle([f"millrace-{NS}.other-0-"])
        assert thread.is_alive(), "that of another partition is not waited for"
        assert differing(clean, load(server, made)) == []
        ended.append(time.monotonic())
        thread.join()
        raise WarehouseError("killed")

    with pytest.raises(WarehouseError, match="killed"):
        load(Interrupted(url, 5, slowly), made)
    assert ended
    assert differing(clean, digests(server)) == []


@pytest.mark.slow
def test_two_processes_bring_in_all_rows_once(server: Server, url: str, made: History) -> None:
    clean = load(server, made)
    emptied(server)
    shares = [GroupShares(made.bus, NS, name) for name in ("one", "two")]
    processes = [Ingest(made.bus, Server(url), NS, lambda data: data, each) for each in shares]
    over = threading.Event()
    threads = [threading.Thread(target=process.follow, args=(over,)) for process in processes]
    for thread in threads:
        thread.start()
    try:
        until = time.monotonic() + PATIENCE_S
        while sum(count for count, _ in digests(server).values()) != sum(count for count, _ in clean.values()):
            assert time.monotonic() < until, [process.trouble for process in processes]
            time.sleep(0.2)
        with pytest.raises(WarehouseError, match=r"one \(memory\), two \(memory\); end them"):
            alone(made.bus, server, NS)
    finally:
        over.set()
        for thread in threads:
            thread.join()
        for share in shares:
            share.close()
    assert differing(clean, digests(server)) == []
    assert made.bus.group(group_of(NS)).members == ()
    alone(made.bus, server, NS)
