"""From the tables of an older release to those of this one, forward only.

Invariants: a store that a newer release has written is refused, and nothing of it is changed; a step is done at most
once to a store, in order, and may be cut short by a kill and done again; a field that is new in a schema is a column
that is new, without a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version

from millrace.consumers.warehouse.store.base import Store
from millrace.consumers.warehouse.store.columns import Column, backtick, text
from millrace.consumers.warehouse.store.tables import BLOCKS, FENCES, LOG, TABLES, UNREADABLE, create_table, own_tables
from millrace.infra.errors import WarehouseError

VERSION = 1
"""of the tables; raised together with a step in STEPS, for what is more than a new column"""
STEPS: Mapping[int, Callable[[Store], None]] = {}
"""by the version that it leads to; each can be done again"""
RELEASES = (
    Column("version", "UInt32", "of the tables"),
    Column("release", "String", "of Millrace, which made them so"),
    Column("since", "DateTime64(3, 'UTC')", "when"),
)


def migrate(store: Store, steps: Mapping[int, Callable[[Store], None]] = STEPS, target: int = VERSION) -> None:
    """Make every database, table and column of this release that is not there. Raises WarehouseError for a store of a
    newer release."""
    store.prepare()
    store.run(create_table("releases", RELEASES, ("version",), "which release made the tables so", by_month=False))
    current = _tables_version(store)
    if current > target:
        (release,) = store.rows(f"SELECT argMax(release, version) FROM {LOG}.releases")[0]
        raise WarehouseError(
            f"the warehouse in {store.where} was written by Millrace {release} (tables of version {current}), and this "
            f"one knows version {target}: upgrade, or give this release a [warehouse] home of its own"
        )
    _refuse_unknown_columns(store)
    for statement in (*(table.create() for table in TABLES), *own_tables()):
        store.run(statement)
    for number in range(current + 1, target + 1) if current else ():
        if number in steps:
            steps[number](store)
        _note(store, number)
    _add_columns(store)
    if not current:
        _note(store, target)


def _tables_version(store: Store) -> int:
    """The version of the tables; 0 of a store without any."""
    return int(store.rows(f"SELECT max(version) FROM {LOG}.releases")[0][0])


def _note(store: Store, number: int) -> None:
    release = text(version("millrace"))
    store.run(f"INSERT INTO {LOG}.releases SETTINGS async_insert = 0 VALUES ({number}, {release}, now64(3))")


def _target_columns() -> dict[str, tuple[Column, ...]]:
    bookkeeping = {"unreadable": UNREADABLE, "blocks": BLOCKS, "fences": FENCES}
    return {**{table.name: table.columns for table in TABLES}, **bookkeeping}


def _columns(store: Store) -> dict[str, dict[str, str]]:
    """Types of the columns that are there, by table."""
    types: dict[str, dict[str, str]] = {}
    for table, name, kind in store.rows(f"SELECT table, name, type FROM system.columns WHERE database = {text(LOG)}"):
        types.setdefault(table, {})[name] = kind
    return types


def _refuse_unknown_columns(store: Store) -> None:
    targets, types = _target_columns(), _columns(store)
    for table, columns in targets.items():
        for name in types.get(table, {}):
            if name not in {column.name for column in columns}:
                raise WarehouseError(
                    f"{LOG}.{table} in {store.where} has a column {name} that this release does not know: a newer one "
                    "made it. Upgrade, or give this release a [warehouse] home of its own"
                )


def _add_columns(store: Store) -> None:
    """Columns of fields that are new in the schemas. Raises WarehouseError for one whose type has changed."""
    there = _columns(store)
    for table, columns in _target_columns().items():
        for column in columns:
            kind = there[table].get(column.name)
            if kind is None:
                store.run(f"ALTER TABLE {LOG}.{table} ADD COLUMN IF NOT EXISTS {column.definition}")
            elif kind.replace(" ", "") != column.type.replace("`", "").replace(" ", ""):
                raise WarehouseError(
                    f"{LOG}.{table}.{backtick(column.name)} in {store.where} is a {kind}, and the schema makes it a "
                    f"{column.type}: `millrace warehouse rebuild` makes the tables anew from the log"
                )
