"""Makes the tables anew from topics and archive, for one namespace.

Invariants: rows that the log cannot give again are not dropped unless whoever asks says so; a rebuild that was cut
short at any statement is ended by whoever opens the warehouse next, since the tables themselves say how far they are
and are emptied so that they never say too much (`dropping`); no row comes in behind a hole from a process that knew
the tables as they were."""

from __future__ import annotations

import os
import socket

from millrace.consumers.warehouse.ingest.ingest import Ingest
from millrace.consumers.warehouse.ingest.shares import group_of
from millrace.consumers.warehouse.ingest.table_choice import Behind, kind_of
from millrace.consumers.warehouse.ingest.topic_identity import COMPACT_TOPICS, recreation_reason, tips
from millrace.consumers.warehouse.open_store import open_store
from millrace.consumers.warehouse.store.base import Store
from millrace.consumers.warehouse.store.drop import drop, of, record_tables, there
from millrace.consumers.warehouse.store.fences import Where, take_over
from millrace.consumers.warehouse.store.migrations import migrate
from millrace.consumers.warehouse.store.retention import keep
from millrace.consumers.warehouse.store.tables import LOG, own_tables
from millrace.infra.config import Settings
from millrace.infra.connect import claims, history
from millrace.infra.errors import TopicError, WarehouseError
from millrace.infra.log.archive.bus import ArchivedBus
from millrace.infra.log.base import Bus
from millrace.infra.log.history.gaps import begins_at, gap_line
from millrace.infra.log.topics import logical_name
from millrace.schemas.ids import new_id

BEYOND_END = 1 << 63
"""where a partition begins of which nothing is left"""
TRIES = 5
"""how often tables are emptied that others fill meanwhile"""


def rebuild(settings: Settings, *, forget: bool = False) -> dict[str, tuple[int, int]]:
    """Make every table anew; gives its rows before and after. forget: rows that the log no longer has may go.

    Raises WarehouseHeld while another process holds the directory, WarehouseError while some bring rows into a server,
    and where rows would be lost."""
    with history(settings) as bus, open_store(settings) as store:
        alone(bus, store, settings.namespace)
        return rebuild_from(bus, store, settings, claims(settings).behind, forget=forget)


def rebuild_from(
    bus: Bus, store: Store, settings: Settings, behind: Behind, *, forget: bool = False
) -> dict[str, tuple[int, int]]:
    """The same for any log. Everything that is archived is read once before anything is dropped: a damaged segment is
    named while the tables are still there."""
    store.prepare()
    namespace = settings.namespace
    before = counts(store, namespace)
    if not forget and (losses := irrecoverable(bus, store, namespace)):
        raise WarehouseError(
            f"rows cannot be made again: {'; '.join(losses)}. `millrace warehouse rebuild --forget` makes the tables of"
            " what is left"
        )
    readable(bus, namespace)
    make_empty(bus, store, settings)
    Ingest(bus, store, namespace, behind).catch_up()
    after = counts(store, namespace)
    return {name: (before.get(name, 0), after.get(name, 0)) for name in sorted({*before, *after})}


def make_empty(bus: Bus, store: Store, settings: Settings) -> None:
    """Every table as this release wants it, without a row of the namespace. On a server no process brings rows in from
    then on that has asked before how far the tables were: it would go on behind a hole. Raises WarehouseError where
    others begin again and again."""
    if store.is_shared:
        for statement in own_tables():
            store.run(statement)
        shut_out(bus, store, settings.namespace)
    for _ in range(TRIES):
        drop(store, settings.namespace)
        migrate(store)
        keep(store, settings.warehouse.keep_days, settings.topics.short_hours)
        if not store.is_shared:
            return
        shut_out(bus, store, settings.namespace)  # who began since, too
        if not any(rows_of(store, name, settings.namespace) for name in there(store)):
            return
    raise WarehouseError(
        f"another warehouse process brings rows into {store.where} while its tables are made anew: end it, then rebuild"
    )


def shut_out(bus: Bus, store: Store, namespace: str) -> None:
    """Have no insert come in of a process that holds a partition of the namespace, also one that sleeps and has left
    the group."""
    partitions: set[Where] = set(store.rows(f"SELECT DISTINCT topic, part FROM {LOG}.fences WHERE {of(namespace)}"))
    for topic in bus.topics(f"{namespace}."):
        if kind_of(logical_name(topic)) is not None:
            partitions |= {(topic, part) for part in range(bus.partitions(topic))}
    take_over(store, f"rebuild-{socket.gethostname()}-{os.getpid()}-{new_id()}", partitions)


def readable(bus: Bus, namespace: str) -> None:
    """Read what only the archive still has. Raises ArchiveError naming the first segment that is damaged."""
    if isinstance(bus, ArchivedBus):
        for topic in bus.topics(f"{namespace}."):
            if kind_of(logical_name(topic)) is not None:
                bus.check(topic)


def alone(bus: Bus, store: Store, namespace: str) -> None:
    """Raises WarehouseError while warehouse processes of the namespace bring rows into a server."""
    members = bus.group(group_of(namespace)).members if store.is_shared else ()
    if members:
        names = ", ".join(sorted(f"{member.client_id} ({member.host})" for member in members))
        raise WarehouseError(f"warehouse processes bring rows into {store.where}: {names}; end them, then rebuild")


def counts(store: Store, namespace: str) -> dict[str, int]:
    """Rows of a namespace by table."""
    return {name: rows_of(store, name, namespace) for name in record_tables(store)}


def rows_of(store: Store, table: str, namespace: str) -> int:
    """Rows of a namespace in a table."""
    return int(store.rows(f"SELECT count() FROM {LOG}.{table} WHERE {of(namespace)}")[0][0])


def irrecoverable(bus: Bus, store: Store, namespace: str) -> list[str]:
    """What a rebuild would lose, in words: rows whose records the log has forgotten, or whose topic was made anew."""
    losses, ends = list[str](), dict[Where, int]()
    for name in record_tables(store):
        spans = store.rows(
            f"SELECT topic, part, min(off), max(off) FROM {LOG}.{name} WHERE {of(namespace)} GROUP BY ALL ORDER BY ALL"
        )
        for topic, part, first, last in spans:
            if logical_name(topic) in COMPACT_TOPICS:
                continue
            start = _start(bus, topic, part)
            if first < start:
                rest = begins_at(start) if start < BEYOND_END else "nothing of it is left"
                losses.append(gap_line(topic, part, first, min(last, start - 1), rest))
            if start < BEYOND_END:
                ends[topic, part] = max(last + 1, ends.get((topic, part), 0))
    last_tips = tips(store, namespace) if ends else {}
    for where, end in ends.items():
        if why := recreation_reason(bus, where, end, last_tips.get(where)):
            losses.append(f"{where[0]}[{where[1]}] {why}: the topic was made anew, and the former one is nowhere")
    return losses


def _start(bus: Bus, topic: str, part: int) -> int:
    """The first offset that the log has of a partition; beyond everything where it has none."""
    try:
        return bus.starts(topic).get(part, BEYOND_END)
    except TopicError:
        return BEYOND_END
