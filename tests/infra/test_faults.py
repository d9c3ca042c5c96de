"""Points kill when armed, once when told so, and are all found in the code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from millrace.infra import faults
from tests.support.fault_points import fault_points

PROGRAM = "from millrace.infra import faults\nfor _ in range(3):\n    faults.point('x')\n    print('alive', flush=True)"


def run(**env: str) -> tuple[int, int]:
    """(exit status, how often the program passed the point)."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], env={**os.environ, **env}, capture_output=True, text=True)
    return done.returncode, done.stdout.count("alive")


def test_an_armed_point_kills_the_nth_time() -> None:
    assert run() == (0, 3)
    assert run(MILLRACE_KILL="y") == (0, 3)
    assert run(MILLRACE_KILL="x") == (-signal.SIGKILL, 0)
    assert run(MILLRACE_KILL="x:3") == (-signal.SIGKILL, 2)


def test_once_means_that_the_next_start_lives(tmp_path: Path) -> None:
    once = {"MILLRACE_KILL": "x:2", "MILLRACE_KILL_ONCE": str(tmp_path / "done")}
    assert run(**once) == (-signal.SIGKILL, 1)
    assert run(**once) == (0, 3)


def test_every_point_is_found_and_has_a_role() -> None:
    names = fault_points()
    assert {"runner.before_begin", "runner.after_send", "transactor.after_offsets", "claims.before_rename"} <= set(
        names
    )
    assert all(name.count(".") == 1 and name == name.lower() for name in names)


def test_a_hook_takes_the_place_of_the_signal() -> None:
    seen: list[str] = []
    before = faults.install(seen.append)
    try:
        faults.point("runner.after_send")
    finally:
        assert faults.install(before) == seen.append
    faults.point("runner.after_send")
    assert seen == ["runner.after_send"]
