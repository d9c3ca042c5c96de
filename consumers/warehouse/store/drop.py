"""Takes the rows of one namespace out of the tables, so that whoever is killed meanwhile leaves no hole.

Rows are written from the outside in: those beside a block's own (`unreadable`, `progress`), then its own, then their
proof in `blocks`. Each of them lets the next warehouse pass over what came before it. So they are taken out the other
way round.

Invariants: at no moment does a table, or `blocks`, say that records are in which are not; rows that a killed process
had begun to delete are gone before anybody asks how far the tables are.
"""

from __future__ import annotations

import time

from millrace.consumers.warehouse.store.base import Store
from millrace.consumers.warehouse.store.columns import text
from millrace.consumers.warehouse.store.tables import LOG, OWN_POSITION
from millrace.infra import faults
from millrace.infra.errors import WarehouseError

LOOK_S = 0.1
PATIENCE_S = 60.0
"""how long rows that somebody began to delete may still be there"""


def drop(store: Store, namespace: str) -> None:
    """Drop the tables, or where other namespaces use them, the rows of this one. May be cut short, and done again."""
    wait_for_deletes(store)
    tables = in_order(there(store))
    has_others = any(
        store.rows(f"SELECT 1 FROM {LOG}.{name} WHERE NOT {of(namespace)} LIMIT 1") for name in users(store)
    )
    for name in tables:
        faults.point("rebuild.before_drop")
        if has_others:
            store.run(f"ALTER TABLE {LOG}.{name} DELETE WHERE {of(namespace)} SETTINGS mutations_sync = 2")
        else:
            store.run(f"DROP TABLE IF EXISTS {LOG}.{name} SYNC")
        faults.point("rebuild.after_drop")


def wait_for_deletes(store: Store) -> None:
    """Wait for rows to be gone that a former process began to delete: an engine ends that by itself, at any time.
    Raises WarehouseError where it does not."""
    until = time.monotonic() + PATIENCE_S
    running = (
        f"SELECT table, mutation_id, latest_fail_reason FROM system.mutations WHERE database = {text(LOG)}"
        " AND NOT is_done AND table != 'fences'"
    )
    while mutations := store.rows(running):
        if time.monotonic() > until:
            table, mutation, reason = mutations[0]
            condition = f"database = {text(LOG)} AND table = {text(table)} AND mutation_id = {text(mutation)}"
            raise WarehouseError(
                f"{store.where} has not ended deleting rows of {LOG}.{table}{reason and f' ({reason})'}: wait, or end"
                f" it (KILL MUTATION WHERE {condition}), then `millrace warehouse rebuild`"
            )
        time.sleep(LOOK_S)


def in_order(names: list[str]) -> list[str]:
    """Tables as they are to be emptied: first what is believed of others. Pure."""
    return sorted(names, key=lambda name: (name != "blocks", name not in OWN_POSITION, name))


def there(store: Store) -> list[str]:
    """Tables that say something of records: those that hold some, and `blocks`."""
    return [*record_tables(store), *_find_table(store, "blocks")]


def users(store: Store) -> list[str]:
    """Tables with a row of whoever uses the store: a process that has brought in nothing yet has a fence."""
    return [*there(store), *_find_table(store, "fences")]


def record_tables(store: Store) -> list[str]:
    """Tables with records that are there."""
    rows = store.rows(
        f"SELECT DISTINCT table FROM system.columns WHERE database = {text(LOG)} AND name = 'off' ORDER BY table"
    )
    return [name for (name,) in rows]


def _find_table(store: Store, table: str) -> list[str]:
    """A table's name, if it is there."""
    rows = store.rows(f"SELECT name FROM system.tables WHERE database = {text(LOG)} AND name = {text(table)}")
    return [name for (name,) in rows]


def of(namespace: str) -> str:
    """SQL for the rows of a namespace."""
    return f"startsWith(topic, {text(namespace + '.')})"
