"""An archiver killed at any point loses nothing, keeps nothing twice, and the next one makes the same segments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.infra.log.archive.archive import Archive
from millrace.infra.log.base import Outgoing
from millrace.infra.log.memory.bus import MemoryBus
from tests.infra.log.archive.test_history import TOPIC, archiver
from tests.support.fault_points import fault_points

POINTS = [name for name in fault_points("infra") if name.startswith("archive.")]
PROGRAM = "import sys; from tests.infra.log.archive import test_killed; test_killed.archive(sys.argv[1])"


def filled() -> MemoryBus:
    bus = MemoryBus({TOPIC: 2}, clock=lambda: 7)
    with bus.publisher() as publisher:
        for n in range(60):
            publisher.publish(Outgoing(TOPIC, b"%d" % n, b"%d" % n * 100))
    return bus


def archive(root: str) -> None:
    list(archiver(filled(), root, size=1500).run())


def state(root: Path) -> dict[str, bytes]:
    """Every file that a reader looks at."""
    found = (path for path in root.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def test_the_points() -> None:
    assert POINTS == ["archive.drafted", "archive.named", "archive.placed"]


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_killed_and_begun_again(point: str, tmp_path: Path) -> None:
    archive(str(tmp_path / "whole"))
    root = tmp_path / "killed"
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(root)],
            env={**os.environ, "MILLRACE_KILL": f"{point}:2"},
            timeout=120,
        )
        assert done.returncode == -signal.SIGKILL
        read = [r for p in (0, 1) for r in Archive(str(root)).records(TOPIC, p, 0, 1000)]
        assert read, "what was kept before the kill reads well"
        assert len({r.place for r in read}) == len(read)
    archive(str(root))
    assert state(root) == state(tmp_path / "whole")
