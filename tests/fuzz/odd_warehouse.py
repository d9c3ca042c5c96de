"""Damaged histories in the warehouse's tables: `python -m tests.fuzz.odd_warehouse DIR COUNT SEED`;
with `silent` behind it, an ingest that names nothing, which is to be found.

A process of its own, since none that has loaded the engine may fork. Each history has a namespace of its own in one
directory. Every record must be one row of one table, or be named as unreadable: no other end, and no stop. What was not
damaged must be a row."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

from millrace.consumers.warehouse.ingest.ingest import UNREADABLE, Ingest
from millrace.consumers.warehouse.store.base import Store
from millrace.consumers.warehouse.store.tables import LOG, TABLES
from millrace.infra.log.base import Place
from millrace.infra.log.history.kinds import topics_of
from millrace.infra.log.memory.bus import MemoryBus
from tests.fuzz.later_readers import STORE, history
from tests.fuzz.odd_logs import OddLog, OddLogs
from tests.support.history_log import NS
from tests.support.history_records import POLICY
from tests.support.warehouse import opened


def moved(bus: MemoryBus, namespace: str) -> MemoryBus:
    """The same log under another namespace, which rows of its records are kept apart by."""
    other = MemoryBus({name.replace(NS, namespace, 1): len(logs) for name, logs in bus.logs.items()})
    for name, logs in bus.logs.items():
        topic = name.replace(NS, namespace, 1)
        for mine, log in zip(other.logs[topic], logs, strict=True):
            mine.entries = [one and replace(one, topic=topic) for one in log.entries]
    return other


def ends(store: Store, namespace: str) -> dict[Place, list[str]]:
    """The tables that each record of a namespace is in."""
    found: dict[Place, list[str]] = {}
    for table in (*(table.name for table in TABLES), UNREADABLE):
        where = f"startsWith(topic, '{namespace}.')"
        for topic, part, offset in store.rows(f"SELECT topic, part, off FROM {LOG}.{table} WHERE {where}"):
            found.setdefault(Place(topic, int(part), int(offset)), []).append(table)
    return found


def take_in(store: Store, odd: OddLog, namespace: str, sound: frozenset[Place]) -> int:
    """How many records of a damaged log were unreadable. Raises AssertionError for one without its one end."""
    bus = moved(odd.bus, namespace)
    Ingest(bus, store, namespace, STORE.behind).catch_up()
    found = ends(store, namespace)
    said = [str(one) for one in odd.done]
    forgets = topics_of(namespace, POLICY)["workers"]
    for topic, logs in bus.logs.items():
        for log in logs if ".changelog." not in topic else ():
            for record in filter(None, log.entries):
                if record.value is None and topic == forgets:
                    continue
                tables = found.get(record.place, [])
                assert len(tables) == 1, f"{record.place} is in {tables} after {said}"
                place = record.place._replace(topic=topic.replace(namespace, NS, 1))
                assert place not in sound or tables != [UNREADABLE], f"{place} is sound, after {said}"
    return sum(tables == [UNREADABLE] for tables in found.values())


def main(folder: Path, count: int, seed: int) -> None:
    logging.disable(logging.CRITICAL)
    logs = OddLogs(history().bus, NS, POLICY)
    every = frozenset(
        one.place
        for topic, some in history().bus.logs.items()
        for log in some
        for one in log.entries
        if one is not None and topic and (one.value or b"")[:2] == b"\xc3\x01"
    )
    unreadable = 0
    with opened(folder) as store:
        for number in range(count):
            odd = logs.odd(Random(f"warehouse {number} {seed}"), most=8)
            unreadable += take_in(store, odd, f"n{number}", every - odd.places)
    print(f"{count} histories, {unreadable} records that could not be read")


if __name__ == "__main__":
    if sys.argv[4:] == ["silent"]:
        Ingest._tell = lambda self, block, bad: None  # type: ignore[method-assign]
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
