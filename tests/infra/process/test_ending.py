"""A process that ends by `end` does what it registered, writes what it printed, and takes no interpreter down, where
threads of the HTTP server would abort it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys
from millrace.infra.process.ending import end
class Kept:
    def __del__(self):
        print("the interpreter was taken down", flush=True)
sys.kept = Kept()
atexit.register(print, "said at the end")
print("said before")
end(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_it_ends_with_its_code_and_nothing_behind_it(code: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(code)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (code, "said before\nsaid at the end\n", "")
