"""How a process that serves HTTP stops and ends.

Invariant: it ends with its own code. The HTTP server (granian) leaves threads behind that wake a moment after it has
stopped; one that asks for the interpreter while that is taken down is ended by it, which Rust takes for a panic that it
cannot unwind, and aborts the process (SIGABRT, 1 of 100 ends on a busy machine)."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn


def end(code: int = 0) -> NoReturn:
    """End this process now, with what it registered for its end done and what it printed written; the interpreter is
    not taken down. Call it when all is closed."""
    # It has no public name, and no public way does the same: leaving by sys.exit first waits for threads, which may
    # never end, and then takes the interpreter down; a function registered with atexit runs before all that were
    # registered earlier, so it could not be the last.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # whoever read it is gone
            stream.flush()
    os._exit(code)


def stop_event() -> asyncio.Event:
    """An event that either signal sets, from now on; for the loop that runs. Neither ends the process by itself any
    more."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
