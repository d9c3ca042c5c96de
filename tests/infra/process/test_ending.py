"""A process that ends by `end` does what it registered, writes what it printed, and takes no interpreter down, where
threads of the HTTP server would abort it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from millrace.infra.process.ending import stop_event

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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_sets_the_event_and_ends_nothing(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    asked = stop_event()
    try:
        assert not asked.is_set()
        os.kill(os.getpid(), number)
        await asked.wait()
    finally:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)
        signal.signal(number, before)
