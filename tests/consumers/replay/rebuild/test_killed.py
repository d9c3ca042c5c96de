"""`replay rebuild --out` killed at every call that changes a file: a topic that can be read is whole, never a shorter
one that reads as well, and whoever begins again ends with the same records."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from millrace.consumers.replay.rebuild import spool
from millrace.infra import faults
from millrace.infra.errors import ReplayError
from millrace.infra.log.archive.archive import Archive
from tests.consumers.replay.rebuild.test_rebuild import again
from tests.infra.log.archive.test_every_call import counted, die
from tests.support.fault_points import fault_points
from tests.support.whole import Whole, whole

KINDS = ("grants", "resolutions")
STRIDE = 1 if os.environ.get("MILLRACE_EVERY_CALL") else 7
MOST = 400
Write = Any


def read(root: Path, topic: str) -> list[tuple[int, int, bytes | None]]:
    """What an archive has of a topic."""
    archive = Archive(str(root))
    shelves = archive.shelves(topic)
    return [(p, r.offset, r.value) for p in shelves for r in archive.records(topic, p, 0, 1 << 40)]


def child(write: Write, root: Path, nth: int, *rest: Any) -> bool:
    """Write in a process of its own, which dies before the nth call. Whether it did."""
    pid = os.fork()
    if pid == 0:
        try:
            with pytest.MonkeyPatch.context() as patch:
                counted(patch, root, partial(die, nth))
                write(root, *rest)
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.slow
def test_killed_at_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history: Whole = whole(2)
    topics = [history.topic(kind) for kind in KINDS]
    wanted = {topic: read_of(history, topic) for topic in topics}
    monkeypatch.setattr(spool, "SEGMENT_BYTES", 2000)  # many segments
    sound, named = spool.RebuildSpool.write, list[int]()

    def write(self: spool.RebuildSpool, root: Path, *rest: Any) -> dict[str, spool.WrittenPartition]:
        for nth in range(1, MOST, STRIDE):
            there = root / str(nth)
            if not child(partial(sound, self), there, nth, *rest):
                break
            found = {topic: read(there, topic) for topic in topics}
            assert all(rows in ([], wanted[topic]) for topic, rows in found.items()), f"before call {nth}"
            named.append(sum(map(bool, found.values())))
            if named[-1]:
                with pytest.raises(ReplayError, match="name another directory"):
                    sound(self, there, *rest)
            else:
                sound(self, there, *rest)
                assert {topic: read(there, topic) for topic in topics} == wanted
                assert not (there / spool.DRAFT).exists()
        return sound(self, root / "whole", *rest)

    monkeypatch.setattr(spool.RebuildSpool, "write", write)
    assert again(history, *KINDS, out=tmp_path).equal
    assert len(named) > 60 / STRIDE
    assert named == sorted(named)
    assert ({0, 1, 2} if STRIDE == 1 else {0, 1}) <= {*named}, "it died in between too"
    print(len(named), "deaths")


def read_of(history: Whole, topic: str) -> list[tuple[int, int, bytes | None]]:
    parts = range(history.bus.partitions(topic))
    return [(p, r.offset, r.value) for p in parts for r in history.bus.read(topic, p)]


@pytest.mark.parametrize("point", [name for name in fault_points("consumers") if name.startswith("rebuilt.")])
def test_the_points(point: str, tmp_path: Path) -> None:
    """Whoever is interrupted there leaves topics that are whole, or none."""
    history: Whole = whole(2)

    def stop(name: str) -> None:
        if name == point:
            raise KeyboardInterrupt

    before = faults.install(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            again(history, *KINDS, out=tmp_path)
    finally:
        faults.install(before)
    assert Archive(str(tmp_path)).topics() == ([] if point == "rebuilt.drafted" else [history.topic(KINDS[0])])
