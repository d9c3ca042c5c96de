"""A rebuild that dies at any of its statements loses nothing: whoever opens the warehouse next has the tables of a
clean load, also where rows are forgotten in time, which makes `blocks` believed. `MILLRACE_EVERY_CALL=1`: at each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from millrace.consumers.warehouse.ingest.ingest import Ingest
from millrace.consumers.warehouse.rebuild import rebuild_from
from millrace.consumers.warehouse.store import drop as dropping
from millrace.consumers.warehouse.store.base import Store
from millrace.consumers.warehouse.store.directory import TableDirectory
from millrace.consumers.warehouse.store.drop import in_order
from millrace.consumers.warehouse.store.migrations import migrate
from millrace.consumers.warehouse.store.retention import keep
from millrace.consumers.warehouse.store.tables import LOG, TABLES
from millrace.infra.config import Settings
from millrace.infra.errors import WarehouseError
from millrace.infra.log.base import Bus, Outgoing, TopicSpec
from millrace.infra.log.memory.bus import MemoryBus
from tests.support.history import History
from tests.support.history_log import NS
from tests.support.warehouse import BEYOND, Digests, differing, digests, first

DAYS = 36_500
"""for which rows are kept: tables have a TTL, and no row of a test is old enough"""
EVERY = bool(os.environ.get("MILLRACE_EVERY_CALL"))
"""whether to die at every statement, or at some"""
OTHER = "other"
"""a namespace beside"""
KINDS = ("raw", "events", "weights", "workers", "trajectories")
"""of topics: rows of each, between records that cannot be read"""


class Died(BaseException):
    """kill -9."""


def log(namespace: str = NS) -> Bus:
    """A few records of some topics."""
    made, bus = History(1, versions=1), MemoryBus(clock=lambda: 1_790_000_000)
    for kind in KINDS:
        topic = made.topic(kind).replace(f"{NS}.", f"{namespace}.", 1)
        bus.ensure_topics([TopicSpec(topic, 1)])
        for value in (first(made, kind), BEYOND, first(made, kind)):
            bus.publisher().publish(Outgoing(topic, b"k", value, partition=0)).result()
    return bus


def load(bus: Bus, store: Store, namespace: str = NS) -> Digests:
    """Open the warehouse as usual, and let it catch up."""
    migrate(store)
    keep(store, DAYS, DAYS * 24)
    Ingest(bus, store, namespace, lambda data: data).catch_up()
    return digests(store, namespace)


def dying(store: Store, patch: pytest.MonkeyPatch, nth: int) -> list[str]:
    """Have the store die instead of the nth statement that changes something; gives those that were run."""
    ran: list[str] = []

    def counted(function: Callable[..., None]) -> Callable[..., None]:
        def call(what: Any, *args: Any) -> None:
            if len(ran) + 1 == nth:
                raise Died
            ran.append(str(what))
            function(what, *args)

        return call

    patch.setattr(store, "run", counted(store.run))
    patch.setattr(store, "insert", counted(store.insert))
    return ran


def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, namespace=NS, topics={"short_hours": DAYS * 24}, warehouse={"keep_days": DAYS})


def rebuild(bus: Bus, store: Store, tmp_path: Path, nth: int = 0) -> list[str]:
    """Rebuild, and die instead of the nth statement; gives the statements that were run."""
    with pytest.MonkeyPatch.context() as patch, suppress(Died):
        ran = dying(store, patch, nth)
        rebuild_from(bus, store, settings(tmp_path), lambda data: data)
    return ran


def takes_out(statement: str) -> bool:
    return "DROP TABLE" in statement or "DELETE WHERE" in statement


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shared", [False, True])
def test_killed_at_any_statement(store: Store, tmp_path: Path, shared: bool) -> None:
    """Also where another namespace keeps its rows in the same tables."""
    bus, other = log(), log(OTHER)
    clean, beside = load(bus, store), load(other, store, OTHER) if shared else {}
    assert clean["unreadable"][0] == len(KINDS)
    ran = rebuild(bus, store, tmp_path)
    assert differing(clean, digests(store, NS)) == []
    assert sum(map(takes_out, ran)) == len(TABLES) + 2
    deaths = [n for n, statement in enumerate(ran, 1) if EVERY or takes_out(statement) or n % 12 == 0]
    for nth in deaths[:: 1 if EVERY else 8]:
        assert len(rebuild(bus, store, tmp_path, nth)) == nth - 1
        assert differing(clean, load(bus, store)) == [], f"killed after {ran[nth - 2]}"
    if shared:
        assert differing(beside, digests(store, OTHER)) == []


def process(path: str, what: str) -> None:
    """What a process does with the tables in a directory: rebuild them, or open them and print their digests."""
    with TableDirectory(Path(path), memory_mb=512) as store:
        if what == "rebuild":
            rebuild_from(log(), store, settings(Path(path)), lambda data: data)
        else:
            print(json.dumps(load(log(), store)))


def run(path: Path, what: str, point: str = "") -> subprocess.CompletedProcess[str]:
    program = f"import sys; from {__name__} import process; process(*sys.argv[1:])"
    command, variables = [sys.executable, "-c", program, str(path), what], {**os.environ, "MILLRACE_KILL": point}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_killed_at_the_points_of_the_code(tmp_path: Path) -> None:
    """The engine itself dies there."""
    clean = json.loads(run(tmp_path, "load").stdout)
    for nth, point in enumerate(("before", "after") * (9 if EVERY else 1), 1):
        assert run(tmp_path, "rebuild", f"rebuild.{point}_drop:{2 * nth}").returncode == -signal.SIGKILL
        assert json.loads(run(tmp_path, "load").stdout) == clean


@pytest.mark.slow
@pytest.mark.parametrize("blocks_first", [True, False])
def test_another_order_of_dropping_would_lose_rows(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks_first: bool
) -> None:
    """`blocks` last: it says of raw, whose rows are forgotten in time, that they were in. `unreadable` before the table
    that says how far the topic is: nobody reads those records again."""
    bus = log()
    clean = load(bus, store)
    order = (lambda name: (name != "blocks", name)) if blocks_first else (lambda name: (name == "blocks", name))
    monkeypatch.setattr(dropping, "in_order", lambda names: sorted(names, key=order))
    ran = rebuild(bus, store, tmp_path)
    last = f"{LOG}.{'workers' if blocks_first else 'blocks'} "
    rebuild(bus, store, tmp_path, next(n for n, each in enumerate(ran, 1) if takes_out(each) and last in each))
    lost = {line.partition(":")[0] for line in differing(clean, load(bus, store))}
    forgetful = {"raw", "events", "trajectories"}
    assert lost == ({"unreadable"} if blocks_first else {*forgetful, "unreadable"})


def test_what_says_how_far_is_dropped_first() -> None:
    names = [*(table.name for table in TABLES), "unreadable", "blocks"]
    found = in_order(names)
    assert sorted(found) == sorted(names)
    assert (found[0], set(found[-2:])) == ("blocks", {"unreadable", "progress"})


@pytest.mark.slow
def test_rows_that_are_still_being_deleted_are_waited_for(store: Store) -> None:
    """Their process was killed, the engine goes on: whoever counted them as there would pass over them."""
    bus = log()
    clean = load(bus, store)
    store.run(f"SYSTEM STOP MERGES {LOG}.raw")
    store.run(f"ALTER TABLE {LOG}.raw DELETE WHERE {dropping.of(NS)} SETTINGS mutations_sync = 0")
    store.run(f"TRUNCATE TABLE {LOG}.blocks")
    timer = threading.Timer(1.0, store.run, (f"SYSTEM START MERGES {LOG}.raw",))
    timer.start()
    try:
        assert differing(clean, load(bus, store)) == []
    finally:
        timer.join()


@pytest.mark.slow
def test_rows_that_are_never_deleted_are_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = log()
    load(bus, store)
    monkeypatch.setattr(dropping, "PATIENCE_S", 0.3)
    store.run(f"SYSTEM STOP MERGES {LOG}.raw")
    try:
        store.run(f"ALTER TABLE {LOG}.raw DELETE WHERE {dropping.of(NS)} SETTINGS mutations_sync = 0")
        with pytest.raises(WarehouseError, match=r"has not ended deleting rows of millrace_log\.raw: wait, or end it"):
            load(bus, store)
    finally:
        store.run(f"SYSTEM START MERGES {LOG}.raw")
