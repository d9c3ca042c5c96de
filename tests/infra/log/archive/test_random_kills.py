"""kill -9 of archivers at random moments: what is kept always reads well, nothing is kept twice, and the end is that of
one that nobody killed. `MILLRACE_ARCHIVE_KILLS` says how often."""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest

from millrace.infra import faults
from millrace.infra.log.archive.archive import Archive
from millrace.infra.log.base import Outgoing
from millrace.infra.log.memory.bus import MemoryBus
from tests.infra.log.archive.test_history import TOPIC, archiver
from tests.infra.log.archive.test_killed import state

KILLS = int(os.environ.get("MILLRACE_ARCHIVE_KILLS", "10"))
RECORDS, SIZE = 1200, 1500
LONGEST_S = 0.05
"""between the first segment of a process and its end"""


def filled() -> MemoryBus:
    bus = MemoryBus({TOPIC: 2}, clock=lambda: 7)
    with bus.publisher() as publisher:
        for n in range(RECORDS):
            publisher.publish(Outgoing(TOPIC, b"%d" % n, b"%d" % n * 100))
    return bus


def died(bus: MemoryBus, root: Path, delay_s: float) -> bool:
    """Archive in a process of its own, killed so long after its first segment. Whether it died of that."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            faults.install(lambda name: (name == "archive.named" and os.write(writing, b"1")) or None)
            list(archiver(bus, root, size=SIZE).run())
        except BaseException:
            os._exit(1)
        os._exit(0)
    os.close(writing)
    select.select([reading], [], [], 120)
    select.select([], [], [], delay_s)
    os.kill(pid, signal.SIGKILL)
    os.close(reading)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.slow
def test_killed_at_random(tmp_path: Path) -> None:
    bus, chance, root, clean = filled(), random.Random(3), tmp_path / "killed", tmp_path / "clean"
    records = {r.place: r for p in (0, 1) for r in bus.read(TOPIC, p)}
    list(archiver(bus, clean, size=SIZE).run())
    kills, kept = 0, Counter[int]()
    while kills < KILLS:
        if not died(bus, root, chance.random() * LONGEST_S):
            assert state(root) == state(clean)
            shutil.rmtree(root)
            continue
        kills += 1
        found = [r for p in (0, 1) for r in Archive(str(root)).records(TOPIC, p, 0, RECORDS)]
        assert [records[r.place] for r in found] == found
        assert len({r.place for r in found}) == len(found)
        kept[len(found)] += 1
    list(archiver(bus, root, size=SIZE).run())
    assert state(root) == state(clean)
    assert len(kept) > KILLS // 4, "they died at different places"
    print(KILLS, "kills,", len(kept), "places,", len(records), "records")
