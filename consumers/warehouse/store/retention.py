"""How long rows are kept: `[warehouse] keep_days`, and those of raw no longer than their topic.

Invariant: what is kept for ever is what the log keeps for ever, unless the settings say days; content as it was before
governance never outlives its topic here."""

from __future__ import annotations

import re

from millrace.consumers.warehouse.store.base import Store
from millrace.consumers.warehouse.store.columns import text
from millrace.consumers.warehouse.store.tables import LOG, TABLES

TTL = re.compile(r" TTL (.*?)(?: SETTINGS |$)")
FOR_EVER = frozenset({"weights", "ledger", "decisions", "principals", "workers"})
"""tables of topics that the log itself keeps for ever"""


def hours_of(table: str, keep_days: int, raw_hours: int) -> int:
    """Hours after which a row of a table is forgotten; 0: never."""
    days = 0 if table in FOR_EVER else keep_days
    if table == "raw":
        return min(raw_hours, days * 24) if days else raw_hours
    return days * 24


def keep(store: Store, keep_days: int, raw_hours: int) -> None:
    """Have each table forget rows in its time, from now on."""
    engines = store.rows(f"SELECT name, engine_full FROM system.tables WHERE database = {text(LOG)}")
    definitions: dict[str, str] = dict(engines)
    for name in (*(table.name for table in TABLES), "unreadable"):
        hours = hours_of(name, keep_days, raw_hours)
        ttl = f"logged + toIntervalHour({hours})" if hours else ""
        match = TTL.search(definitions[name])
        if (match.group(1).strip() if match else "") == ttl:
            continue
        change = f"MODIFY TTL {ttl}" if ttl else "REMOVE TTL"
        store.run(f"ALTER TABLE {LOG}.{name} {change} SETTINGS materialize_ttl_after_modify = 0")
