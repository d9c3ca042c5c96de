"""An ingest that dies at every call by which the engine changes a file, as a process: its arguments are
DIRECTORY and STRIDE; the library of `built` is preloaded.

A directory with a block of rows is made once. For every STRIDEth call a process works on a copy of it, takes in what
has come since (rows of two tables, a record that cannot be read, the proof of it), and is killed before that call;
another one then opens what is left and takes in the rest. Prints in JSON which calls there were, at how many a process
died, and where the digests of any table are not those of a clean load."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from millrace.consumers.warehouse.ingest.ingest import Ingest
from millrace.infra.log.base import Outgoing, TopicSpec
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas import codec
from tests.support.history import History
from tests.support.history_log import NS
from tests.support.warehouse import BEYOND, Digests, differing, digests, first, forked, opened

SOURCE = Path(__file__).with_suffix(".c")
NAME = 16
"""bytes of the name of a call"""


def built(folder: Path) -> Path:
    """The library, compiled."""
    made = folder / "every_call.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(made), str(SOURCE), "-ldl"], check=True)
    return made


def publish(bus: MemoryBus, *values: bytes) -> None:
    """One transaction's worth of records of the topic."""
    for value in values:
        bus.publisher().publish(Outgoing(f"{NS}.events", b"k", value, partition=0)).result()


def take_in(bus: MemoryBus, path: Path, told: int, nth: int = 0) -> None:
    """Take in what the log holds, dying before the nth call; tells the digests and the calls in JSON."""
    library = ctypes.CDLL(None)
    with opened(path) as store:
        ingest = Ingest(bus, store, NS, lambda data: data)
        library.every_call_arm(str(path).encode(), nth)
        ingest.catch_up()
        count = library.every_call_count()
        names = ((ctypes.c_char * NAME) * count).in_dll(library, "every_call_names")
        calls = [bytes(name).partition(b"\0")[0].decode() for name in names]
        found = digests(store)
    with os.fdopen(told, "w") as file:
        json.dump({"digests": found, "calls": calls}, file)


def process(bus: MemoryBus, path: Path, nth: int = 0) -> tuple[Digests, list[str]] | None:
    """A process of its own; None if it died."""
    reading, writing = os.pipe()
    pid = forked(lambda: take_in(bus, path, writing, nth))
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == -signal.SIGKILL:
        return None
    if code:
        raise SystemExit(f"a process ended with {code}")
    found = json.loads(said)
    return {name: (count, values) for name, (count, values) in found["digests"].items()}, found["calls"]


def anew(bus: MemoryBus, ready: Path, tables: Path, nth: int = 0) -> tuple[Digests, list[str]] | None:
    """A process on a copy, always in one place: the engine's own links name it."""
    shutil.rmtree(tables, ignore_errors=True)
    shutil.copytree(ready, tables, symlinks=True)
    return process(bus, tables, nth)


def main() -> None:
    """Die at every so many calls."""
    folder, stride = Path(sys.argv[1]), int(sys.argv[2])
    made, bus = History(1, versions=1), MemoryBus(clock=lambda: 1_790_000_000)
    bus.ensure_topics([TopicSpec(f"{NS}.events", 1)])
    event, progress = first(made, "events"), codec.encode("Progress", {"stage": "seal", "slot": 0, "time": 0})
    publish(bus, event, progress)
    tables, ready = folder / "tables", folder / "ready"
    assert process(bus, tables) is not None
    os.rename(tables, ready)
    publish(bus, event, BEYOND, progress, event)
    whole, nth, deaths, wrong = anew(bus, ready, tables), 1, Counter[str](), list[str]()
    assert whole is not None
    clean, calls = whole
    while anew(bus, ready, tables, nth) is None:
        deaths[calls[min(nth, len(calls)) - 1]] += 1
        done = process(bus, tables)
        assert done is not None
        wrong += [f"killed before call {nth}: {each}" for each in differing(clean, done[0])]
        nth += stride
    rows = {name: count for name, (count, _) in clean.items() if count}
    print(json.dumps({"calls": Counter(calls), "deaths": deaths, "wrong": wrong, "rows": rows}))


if __name__ == "__main__":
    main()
