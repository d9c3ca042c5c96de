"""Which namespace the tables of a server belong to: the first that brought rows in.

Views join by policy, ticket and seq, and each table has one retention: neither tells two deployments apart. So a server
holds one namespace, and a second one is refused by name before anything is altered.

Invariant: making a view where it is not is atomic on a server, so of two that come at once one is refused."""

from __future__ import annotations

from millrace.consumers.warehouse.columns import text
from millrace.consumers.warehouse.store import Store
from millrace.consumers.warehouse.tables import LOG
from millrace.infra.errors import WarehouseError

OWNER = f"{LOG}.namespace"
"""a view of one row, which names it"""
FIRST = f"SELECT substringIndex(topic, '.', 1) AS first FROM {LOG}.blocks GROUP BY first ORDER BY min(written) LIMIT 1"


def claim(store: Store, namespace: str) -> None:
    """Have a server's tables belong to a namespace. Raises WarehouseError where they are another's."""
    store.prepare()
    there = {name for (name,) in store.rows(f"SELECT name FROM system.tables WHERE database = {text(LOG)}")}
    if "namespace" not in there:
        former = store.rows(FIRST) if "blocks" in there else []
        first = former[0][0] if former else namespace
        store.run(f"CREATE VIEW IF NOT EXISTS {OWNER} AS SELECT {text(first)} AS namespace")
    ((owner,),) = store.rows(f"SELECT namespace FROM {OWNER}")
    if owner != namespace:
        raise WarehouseError(
            f"the tables at {store.where} are those of namespace {owner}, and a server holds one: its views and its "
            f"retention do not tell two apart. Give {namespace} a ClickHouse server of its own in [warehouse] url, or "
            "leave that empty for tables in a directory"
        )
