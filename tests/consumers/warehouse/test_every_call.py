"""An ingest killed at every call by which the engine changes a file: writes, new files and directories, renames.
Nothing lost, nothing doubled. `MILLRACE_EVERY_CALL=1` kills at each of them, else at some."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.consumers.warehouse.every_call import built

EVERY = bool(os.environ.get("MILLRACE_EVERY_CALL"))
STRIDE = 1 if EVERY else 29
HERE = platform.system() == "Linux" and platform.machine() == "x86_64"


@pytest.mark.slow
@pytest.mark.timeout(3600 if EVERY else 300)
@pytest.mark.skipif(not HERE or not shutil.which("cc"), reason="counting calls needs a C compiler (cc) on x86-64 Linux")
def test_killed_at_every_call_of_an_insert(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.consumers.warehouse.every_call", str(tmp_path), str(STRIDE)]
    variables = {**os.environ, "LD_PRELOAD": str(built(tmp_path))}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["wrong"] == []
    assert found["rows"] == {"events": 3, "progress": 2, "unreadable": 1}
    assert {"write", "create", "mkdir", "rename", "fdatasync"} <= found["calls"].keys()
    assert sum(found["deaths"].values()) >= sum(found["calls"].values()) // STRIDE > 3
