"""Processes that stand still: the signal alone returns while their threads still run."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 60.0


def stop(pid: int) -> None:
    """SIGSTOP, and wait until every thread stands still, or the process is gone."""
    os.kill(pid, signal.SIGSTOP)
    await_stopped(pid)


def await_stopped(pid: int) -> None:
    """Wait until a process that got SIGSTOP stands still, or is gone."""
    deadline = time.monotonic() + PATIENCE_S
    while not set(_states(pid)) <= set("TtZX"):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.005)


def _states(pid: int) -> list[str]:
    """One letter a thread."""
    found: list[str] = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # a thread that ended meanwhile
            found.append(stat.read_text().rpartition(")")[2].split()[0])
    return found
