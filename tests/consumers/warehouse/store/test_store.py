"""Tables of any store: their columns, what is kept, and which release may write."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from millrace.consumers.warehouse.ingest.ingest import Ingest
from millrace.consumers.warehouse.store import migrations, tables
from millrace.consumers.warehouse.store.base import Store
from millrace.consumers.warehouse.store.columns import Column, columns_of
from millrace.consumers.warehouse.store.migrations import VERSION, migrate
from millrace.consumers.warehouse.store.retention import hours_of, keep
from millrace.consumers.warehouse.store.server import Server
from millrace.consumers.warehouse.store.tables import LOG, TABLES, VIEWS
from millrace.infra.errors import WarehouseError
from millrace.schemas.registry import BODIES, current
from tests.support.history import History
from tests.support.history_log import NS


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(WarehouseError, match=r"127\.0\.0\.1:1.*\[warehouse\] url") as raised:
        Server("http://me:secret@127.0.0.1:1")
    assert "secret" not in str(raised.value)


def test_both_databases_are_there_and_every_column_says_what_it_holds(store: Store) -> None:
    found = {name for (name,) in store.rows("SELECT name FROM system.databases")}
    assert {LOG, VIEWS} <= found
    assert store.rows(f"SELECT table, name FROM system.columns WHERE database = '{LOG}' AND comment = ''") == []
    count = store.rows(f"SELECT count() FROM system.columns WHERE database = '{LOG}' AND table = 'events'")
    assert count == [(len(tables.BY_NAME["events"].columns),)]


def test_every_field_of_every_record_is_a_column() -> None:
    for table in TABLES:
        names = {column.name for column in table.columns}
        for field in current(table.record).definition["fields"]:
            if (table.record, field["name"]) != ("Event", "body"):
                assert any(
                    n == field["name"] or n.startswith((f"{field['name']}_", f"{field['name']}.")) for n in names
                )
    for kind, body in BODIES.items():
        for field in current(body).definition["fields"]:
            assert any(column.name.startswith(f"{kind}_{field['name']}") for column in columns_of("Event"))


# -- releases


def test_a_store_of_a_newer_release_is_refused_by_name(store: Store) -> None:
    store.run(f"INSERT INTO {LOG}.releases SETTINGS async_insert = 0 VALUES ({VERSION + 1}, '9.9', now64(3))")
    with pytest.raises(WarehouseError, match=r"Millrace 9\.9.*upgrade"):
        migrate(store)


def test_a_column_of_a_newer_release_is_refused_by_name(store: Store) -> None:
    store.run(f"ALTER TABLE {LOG}.ledger ADD COLUMN later String")
    with pytest.raises(WarehouseError, match=r"millrace_log\.ledger .* later"):
        migrate(store)


def test_a_field_that_is_new_is_a_column_that_is_new(store: Store) -> None:
    made = History(1, versions=1)
    Ingest(made.bus, store, NS, lambda data: data).catch_up()
    store.run(f"ALTER TABLE {LOG}.ledger DROP COLUMN layout")
    migrate(store)
    assert store.rows("SELECT DISTINCT layout FROM ledger") == [("",)]


def test_steps_are_done_once_and_in_order(store: Store) -> None:
    done: list[int] = []
    steps = {number: lambda _, number=number: done.append(number) for number in (VERSION + 1, VERSION + 2)}
    for _ in range(2):
        migrate(store, steps, VERSION + 2)
    assert done == [VERSION + 1, VERSION + 2]
    with pytest.raises(WarehouseError, match="upgrade"):
        migrate(store)


def test_a_column_whose_type_changed_asks_for_a_rebuild(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = (*(replace(each, type="Int8") if each.name == "size" else each for each in tables.UNREADABLE),)
    assert all(isinstance(each, Column) for each in changed)
    monkeypatch.setattr(migrations, "UNREADABLE", changed)
    with pytest.raises(WarehouseError, match="rebuild"):
        migrate(store)


# -- retention


def test_how_long_rows_are_kept() -> None:
    assert hours_of("events", 0, 24) == 0
    assert hours_of("raw", 0, 24) == 24
    assert (hours_of("raw", 3, 24), hours_of("events", 3, 24)) == (24, 72)
    assert hours_of("ledger", 3, 24) == 0


@pytest.mark.parametrize("hours", [24 * 365 * 90, 24])
def test_what_is_kept_for_long_is_kept(store: Store, hours: int) -> None:
    """Also beyond the last moment of a DateTime, 2106."""
    made = History(1, versions=1)
    made.now = int(time.time() * 1e6)
    made.status("engine-0", "engine", 1)
    keep(store, hours // 24, hours)
    made.rollout(made.episode("late", 0, None))
    Ingest(made.bus, store, NS, lambda data: data).catch_up()
    store.run(f"OPTIMIZE TABLE {LOG}.raw FINAL")
    ((kept, old),) = store.rows("SELECT countIf(logged > '2025-01-01'), countIf(logged < '2025-01-01') FROM raw")
    assert kept > 0
    assert (old > 0) == (hours > 24)


def test_rows_that_are_forgotten_are_not_taken_in_again(store: Store) -> None:
    made = History(1, versions=1)
    keep(store, 1, 24)
    Ingest(made.bus, store, NS, lambda data: data).catch_up()
    for table in ("raw", "events"):
        store.run(f"OPTIMIZE TABLE {LOG}.{table} FINAL")
        assert store.rows(f"SELECT count() FROM {table}") == [(0,)], "they were written in 2023"
    assert Ingest(made.bus, store, NS, lambda data: data).catch_up() == 0
    keep(store, 0, 0)
    assert store.rows(f"SELECT name FROM system.tables WHERE engine_full LIKE '% TTL %' AND database = '{LOG}'") == []
