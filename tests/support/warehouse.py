"""The log of a whole world in tables, taken in by processes that are killed: `python -m tests.support.warehouse WHERE
SEED KILLS`, a directory or the URL of a server that is for tests alone.

The world is made once; each process is a fork that opens the directory, and dies at a random moment after its first
block, or at a point of the code. Prints the digests of what the last one finds there, in JSON."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.consumers.warehouse.ingest import blocks as cutting
from millrace.consumers.warehouse.ingest.ingest import Ingest
from millrace.consumers.warehouse.store.base import Store
from millrace.consumers.warehouse.store.columns import backtick, text
from millrace.consumers.warehouse.store.migrations import migrate
from millrace.consumers.warehouse.store.server import Server
from millrace.consumers.warehouse.store.tables import LOG, TABLES, UNREADABLE
from millrace.infra import faults
from millrace.infra.log.base import Bus, Outgoing
from tests.support.fault_points import fault_points
from tests.support.history import History
from tests.support.history_log import NS

BEYOND = b"never a record"
LONGEST_S = 0.4
"""between the first block of a process and its end"""


def world(seed: int, versions: int = 4) -> History:
    """A world with what cannot be read between what can: bytes of nobody, a cut record, one that is longer than it is,
    a tombstone, another topic's record."""
    made = History(seed, versions)
    publisher = made.bus.publisher()
    for kind in ("events", "trajectories", "ledger"):
        topic = made.topic(kind)
        sound, other = first(made, kind), first(made, "grants")
        for value in (BEYOND, sound[:-3], sound + b"\x00\x02", None, other, sound):
            publisher.publish(Outgoing(topic, b"k", value, partition=0)).result()
    return made


def first(made: History, kind: str) -> bytes:
    """The first record of a kind of topic, in whichever partition."""
    topic = made.topic(kind)
    return next(r.value or b"" for p in range(made.bus.partitions(topic)) for r in made.bus.read(topic, p))


@contextmanager
def opened(path: Path | str) -> Iterator[Store]:
    """A directory with its tables, or a server by URL."""
    if isinstance(path, str):
        with Server(path) as server:
            migrate(server)
            yield server
        return
    from millrace.consumers.warehouse.store.directory import TableDirectory  # no process that has loaded chdb may fork

    with TableDirectory(path, memory_mb=512) as store:
        migrate(store)
        yield store


def emptied(path: Path | str) -> None:
    """Begin anew."""
    if isinstance(path, str):
        with Server(path) as server:
            server.run(f"DROP DATABASE IF EXISTS {LOG} SYNC")
    else:
        shutil.rmtree(path)


def take_in(bus: Bus, path: Path | str) -> Digests:
    """Take in all that the log holds; gives the digests of every table."""
    with opened(path) as store:
        Ingest(bus, store, NS, lambda data: data).catch_up()
        return digests(store)


def forked(work: Callable[[], None]) -> int:
    """Do it in a process of its own; gives its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def killed(bus: Bus, path: Path | str, delay_s: float) -> bool:
    """Take in, and die so long after the first block. Whether it did, before it was done."""
    reading, writing = os.pipe()

    def work() -> None:
        faults.install(lambda name: (name == "warehouse.after_insert" and os.write(writing, b"1")) or None)
        take_in(bus, path)

    pid = forked(work)
    os.close(writing)
    began = select.select([reading], [], [], 120)[0] and os.read(reading, 1)
    if began:
        select.select([], [], [], delay_s)
        os.kill(pid, signal.SIGKILL)
    os.close(reading)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code not in (0, -signal.SIGKILL):
        raise SystemExit(f"a process ended with {code}")
    return code == -signal.SIGKILL


def killed_at(bus: Bus, path: Path | str, point: str, nth: int) -> bool:
    """Take in, and die where the code passes a point for the nth time. Whether it did."""

    def work() -> None:
        passed = 0

        def hook(name: str) -> None:
            nonlocal passed
            passed += name == point
            if passed == nth:
                os.kill(os.getpid(), signal.SIGKILL)

        faults.install(hook)
        take_in(bus, path)

    return os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1]) == -signal.SIGKILL


def main() -> None:
    """Kill at every point, then so often at random; then end it well."""
    where: Path | str = sys.argv[1] if sys.argv[1].startswith("http") else Path(sys.argv[1])
    seed, kills = int(sys.argv[2]), int(sys.argv[3])
    cutting.SPAN = 8  # many blocks
    bus, chance = world(seed).bus, random.Random(seed)
    points = [name for name in fault_points("consumers") if name.startswith("warehouse.")]
    died: dict[str, int] = dict.fromkeys(points, 0)
    for point in points:
        for nth in (1, 2):
            if not killed_at(bus, where, point, nth):  # a former one had come so far: from the beginning
                emptied(where)
                died[point] += killed_at(bus, where, point, nth)
            else:
                died[point] += 1
    done = finished = 0
    while done < kills:
        if killed(bus, where, chance.random() * LONGEST_S):
            done += 1
        else:  # all was taken in before the moment came: from the beginning
            finished += 1
            emptied(where)
    reading, writing = os.pipe()

    def last() -> None:
        os.write(writing, json.dumps(take_in(bus, where)).encode())

    pid = forked(last)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        found = json.loads(file.read())
    os.waitpid(pid, 0)
    print(json.dumps({"digests": found, "points": died, "kills": done, "finished": finished}))


Digests = dict[str, tuple[int, dict[str, int]]]
"""rows and digest by column, by table"""


def digests(store: Store, namespace: str = "") -> Digests:
    """Rows and digests of every table of records. namespace: of its topics alone."""
    columns = {table.name: table.columns for table in TABLES} | {"unreadable": UNREADABLE}
    where = f"WHERE startsWith(topic, {text(namespace + '.')})" if namespace else ""
    found: Digests = {}
    for name, some in columns.items():
        sums = (f"sum(cityHash64(toString(topic), part, off, toString({backtick(column.name)})))" for column in some)
        (count, *values), *_ = store.rows(f"SELECT count(), {', '.join(sums)} FROM {LOG}.{name} {where}")
        found[name] = (count, {column.name: value for column, value in zip(some, values, strict=True)})
    return found


def differing(first: Digests, second: Digests) -> list[str]:
    """Tables and columns in which two differ, in words."""
    out = []
    for name, (count, values) in first.items():
        second_count, second_values = second[name]
        wrong = [column for column, value in values.items() if second_values[column] != value]
        if count != second_count or wrong:
            out.append(f"{name}: {count} rows and {second_count}; columns {', '.join(wrong) or 'equal'}")
    return out


if __name__ == "__main__":
    main()
