"""kill -9 over ingest: at every point of the code and at random moments, each after at least one block. Nothing lost,
nothing doubled: the digest of every column of every table is that of a clean load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stores import URL
from tests.support.warehouse import differing, emptied, take_in, world

KILLS = int(os.environ.get("MILLRACE_WAREHOUSE_KILLS", "12"))
SEED = 11


@pytest.mark.slow
@pytest.mark.timeout(300 + KILLS * 10)
@pytest.mark.parametrize("server", [False, *([True] if URL else [])])
def test_kills_lose_and_double_nothing(tmp_path: Path, server: bool) -> None:
    """In a directory, where the engine dies too, and on the server of MILLRACE_CLICKHOUSE_URL."""
    if server:
        emptied(URL)
    where = URL if server else str(tmp_path / "killed")
    command = [sys.executable, "-m", "tests.support.warehouse", where, str(SEED), str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280 + KILLS * 10)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == KILLS
    assert all(found["points"].values()), found["points"]
    clean = take_in(world(SEED).bus, tmp_path / "clean")
    killed = {name: (count, values) for name, (count, values) in found["digests"].items()}
    assert differing(clean, killed) == []
    assert clean["events"][0] > 0
