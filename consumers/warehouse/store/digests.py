"""Digests of tables, by which two warehouses are compared: one a column, whatever order the rows lie in."""

from __future__ import annotations

from millrace.consumers.warehouse.store.base import Store
from millrace.consumers.warehouse.store.columns import quoted, text
from millrace.consumers.warehouse.store.tables import LOG, TABLES, UNREADABLE

Digests = dict[str, tuple[int, dict[str, int]]]
"""rows and digest by column, by table"""


def digests(store: Store, namespace: str = "") -> Digests:
    """Rows and digests of every table of records. namespace: of its topics alone."""
    columns = {table.name: table.columns for table in TABLES} | {"unreadable": UNREADABLE}
    where = f"WHERE startsWith(topic, {text(namespace + '.')})" if namespace else ""
    found: Digests = {}
    for name, some in columns.items():
        sums = (f"sum(cityHash64(toString(topic), part, off, toString({quoted(column.name)})))" for column in some)
        (count, *values), *_ = store.rows(f"SELECT count(), {', '.join(sums)} FROM {LOG}.{name} {where}")
        found[name] = (count, {column.name: value for column, value in zip(some, values, strict=True)})
    return found


def differing(one: Digests, other: Digests) -> list[str]:
    """Tables and columns in which two differ, in words."""
    out = []
    for name, (count, values) in one.items():
        others, them = other[name]
        wrong = [column for column, value in values.items() if them[column] != value]
        if count != others or wrong:
            out.append(f"{name}: {count} rows and {others}; columns {', '.join(wrong) or 'equal'}")
    return out
