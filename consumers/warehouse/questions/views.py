"""The views of the database `millrace`: what readers ask, in words of the field, over the tables of the log.

Each is a file of `views/`: a sentence, a line for each column, and a SELECT. Columns are documented in ClickHouse too,
so `DESCRIBE trajectories` explains them.

Invariants: a view has exactly the columns that its file documents; views join by places of the log wherever the log
holds a place; a view is replaced as a whole, so a reader sees the old one or the new one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Protocol

from millrace.consumers.warehouse.questions.headers import File, read
from millrace.consumers.warehouse.store.columns import backtick, text
from millrace.consumers.warehouse.store.tables import VIEWS

LATER = ("samples", "staleness", "groups", "waits", "costs")
"""views that read other views, in the order in which they can be made"""


class Tables(Protocol):
    """What a store must do for the views: `millrace.consumers.warehouse.store.base.Store` does."""

    def rows(self, sql: str, *, database: str) -> list[tuple[object, ...]]: ...

    def run(self, sql: str, database: str) -> None: ...


@cache
def views() -> tuple[File, ...]:
    """Every view, in an order in which they can be made."""
    files = read("views")
    return (*(view for name, view in files.items() if name not in LATER), *(files[name] for name in LATER))


def install(store: Tables) -> None:
    """Make every view, and drop those of former releases. Raises WarehouseError."""
    names = {view.name for view in views()}
    for (name,) in store.rows(f"SELECT name FROM system.tables WHERE database = {text(VIEWS)}", database=VIEWS):
        if name not in names:
            store.run(f"DROP VIEW IF EXISTS {backtick(str(name))}", VIEWS)
    for view in views():
        columns = store.rows(f"DESCRIBE TABLE ({view.sql})", database=VIEWS)
        store.run(creation(view, {str(name): str(kind) for name, kind, *_ in columns}), VIEWS)


def creation(view: File, types: dict[str, str]) -> str:
    """SQL that makes a view whose columns have these types. Raises ValueError where a column is not documented."""
    if list(types) != list(view.names):
        differing = sorted(set(types) ^ set(view.names)) or "their order"
        raise ValueError(f"view {view.name} documents other columns than it has: {differing}")
    columns = ",\n  ".join(_definitions(view, types))
    return f"CREATE OR REPLACE VIEW {backtick(view.name)} (\n  {columns}\n) AS {view.sql}\nCOMMENT {text(view.doc)}"


def _definitions(view: File, types: dict[str, str]) -> Iterator[str]:
    for name, kind in types.items():
        yield f"{backtick(name)} {kind} COMMENT {text(view.names[name])}"
