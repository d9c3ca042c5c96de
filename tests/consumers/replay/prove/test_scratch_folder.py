"""A replay's folder is its own, and what a killed one left goes with the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.consumers.replay.prove.command import SCRATCH_PREFIX, scratch_folder, sweep

HOLDS = """
from millrace.consumers.replay.prove.command import scratch_folder
with scratch_folder() as folder:
    (folder / "weights").write_bytes(b"x")
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_it_is_private_and_goes_with_the_block(tmp_path: Path) -> None:
    with scratch_folder() as one, scratch_folder() as two:
        assert one != two
        assert one.stat().st_mode & 0o077 == 0
        (one / "file").write_text("x")
        assert sweep(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_one_left_goes_with_the_next(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    held = Path(process.stdout.readline().strip())
    other = tmp_path / f"{SCRATCH_PREFIX}link"
    other.symlink_to(held)
    with scratch_folder():
        assert held.is_dir()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert held.is_dir()
    with scratch_folder():
        assert not held.exists()
    assert other.is_symlink()
