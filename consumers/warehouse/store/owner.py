"""Which namespace the tables of a server belong to: whose rows are in them, or who opens them first.

Views join by policy, ticket and seq, and each table has one retention: neither tells two deployments apart. So a server
holds one namespace, and a second one is refused by name before anything is altered.

Invariants: making a view where it is not is atomic on a server, so of two that come at once one is refused; tables with
rows of several are nobody's until one of them takes them; a `take` that was cut short is not forgotten, since the
fences of the others go last.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterable

from millrace.consumers.warehouse.store.base import Store
from millrace.consumers.warehouse.store.columns import text
from millrace.consumers.warehouse.store.drop import drop, of, users
from millrace.consumers.warehouse.store.fences import Where, take_over
from millrace.consumers.warehouse.store.tables import LOG, own_tables
from millrace.infra.errors import WarehouseError
from millrace.schemas.ids import new_id

OWNER = f"{LOG}.namespace"
"""a view of one row, which names it"""
SMALL_TABLES = ("blocks", "fences")
"""tables that name whoever brought rows in, and are read in no time"""


def claim(store: Store, namespace: str) -> None:
    """Have a server's tables belong to a namespace. Raises WarehouseError where they are another's, or several's."""
    store.prepare()
    owner = _owner(store)
    names = namespaces(
        store, users(store) if owner is None else [name for name in users(store) if name in SMALL_TABLES]
    )
    if owner is None and len(names) < 2:
        first = next(iter(names), namespace)
        store.run(f"CREATE VIEW IF NOT EXISTS {OWNER} AS SELECT {text(first)} AS namespace")
    confirm(store, namespace)
    if rivals := names - {namespace}:
        raise WarehouseError(
            f"the tables at {store.where} hold rows of the namespaces {', '.join(sorted(names | {namespace}))}, and a "
            f"server holds one: its views and its retention do not tell two apart. `millrace warehouse take"
            f"{_froms(rivals)}` keeps those of {namespace} and deletes the others'; or give {namespace} a ClickHouse "
            "server of its own in [warehouse] url"
        )


def confirm(store: Store, namespace: str) -> None:
    """Raises WarehouseError where a server's tables belong to another namespace."""
    owner = _owner(store)
    if owner not in (None, namespace):
        raise WarehouseError(
            f"the tables at {store.where} are those of namespace {owner}, and a server holds one: its views and its "
            f"retention do not tell two apart. Give {namespace} a ClickHouse server of its own in [warehouse] url, or "
            f"leave that empty for tables in a directory; where nobody needs {owner} there, `millrace warehouse take"
            f"{_froms([str(owner)])}` deletes its rows"
        )


def take(store: Store, namespace: str, rivals: Collection[str]) -> dict[str, int]:
    """Delete the rows of these other namespaces, and have a server's tables belong to this one; gives the records that
    went, by namespace. Their processes are shut out first. May be cut short, and done again. Raises WarehouseError
    where the tables hold rows of one that is not named."""
    store.prepare()
    for statement in own_tables():
        store.run(statement)
    tables = users(store)
    if strangers := namespaces(store, tables) - {namespace, *rivals}:
        raise WarehouseError(
            f"the tables at {store.where} hold rows of {', '.join(sorted(strangers))} too, and would be deleted: name "
            f"every namespace to delete, `millrace warehouse take{_froms({*rivals, *strangers} - {namespace})}`"
        )
    store.run(f"CREATE OR REPLACE VIEW {OWNER} AS SELECT {text(namespace)} AS namespace")
    counts = dict[str, int]()
    for rival in sorted({*rivals} - {namespace}):
        tables = users(store)  # dropping the one before may have left none
        partitions: set[Where] = set()
        for name in tables:
            partitions.update(store.rows(f"SELECT DISTINCT topic, part FROM {LOG}.{name} WHERE {of(rival)}"))
        take_over(store, f"take-{socket.gethostname()}-{os.getpid()}-{new_id()}", partitions)
        queries = (f"SELECT count() FROM {LOG}.{name} WHERE {of(rival)}" for name in tables if name not in SMALL_TABLES)
        counts[rival] = sum(int(store.rows(sql)[0][0]) for sql in queries)
        drop(store, rival)
    if "fences" in users(store):
        store.run(f"ALTER TABLE {LOG}.fences DELETE WHERE NOT {of(namespace)} SETTINGS mutations_sync = 2")
    return counts


def namespaces(store: Store, tables: Iterable[str]) -> set[str]:
    """Those with a row in some tables."""
    return {
        name
        for table in tables
        for (name,) in store.rows(f"SELECT DISTINCT substringIndex(topic, '.', 1) FROM {LOG}.{table}")
    }


def _owner(store: Store) -> str | None:
    """Whom the view names, None where there is none."""
    view = f"SELECT 1 FROM system.tables WHERE database = {text(LOG)} AND name = 'namespace'"
    return str(store.rows(f"SELECT namespace FROM {OWNER}")[0][0]) if store.rows(view) else None


def _froms(names: Iterable[str]) -> str:
    return "".join(f" --from {name}" for name in sorted(names))
