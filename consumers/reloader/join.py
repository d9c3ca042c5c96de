"""The process `millrace engine join`: an engine with its reloader, which joins a fleet by the log alone.

The engine is a child, `millrace engine` with the same settings, so that its settings and its start are those of every
engine. Invariants: an engine that ends is started again, while this process lives, and nothing of its former start
lives beside it; it ends with this process, however that ends; on SIGTERM it first takes no new calls, and is given
`PATIENCE_S` to end those that it has."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from millrace.consumers.reloader.serve import reloader_of
from millrace.consumers.reloader.shell import Reloader
from millrace.infra.config import Settings
from millrace.infra.process.ending import stop_event

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "millrace.apps.cli.main", "engine")
PATIENCE_S = 30.0
"""how long the calls of an engine may take to end once it was told to"""
END_S = 15.0
"""how long an engine may take to end"""
PAUSE_S = 1.0
MOST_PAUSE_S = 30.0
"""between two starts of an engine that keeps ending"""
PDEATHSIG = 1
"""PR_SET_PDEATHSIG of prctl(2)"""


def run(settings: Settings) -> None:
    """Run the engine of [engine] url, kept on the newest version and announced, until it is drained."""
    asyncio.run(_run(settings, COMMAND))


async def _run(settings: Settings, command: Sequence[str]) -> None:
    stop, over = stop_event(), asyncio.Event()
    child = EngineChild(command)
    async with reloader_of(
        settings, settings.engine.url, is_here=True, restart=child.end, on_drain=over.set
    ) as reloader:
        tasks = [
            asyncio.create_task(work) for work in (child.run(over), reloader.run(over), _leave(stop, reloader, over))
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.set()
            await asyncio.gather(*tasks)


async def _leave(stop: asyncio.Event, reloader: Reloader, over: asyncio.Event) -> None:
    """Once `stop` or `over` is set, until the engine is drained or nobody waits for that any longer."""
    waits = [asyncio.create_task(event.wait()) for event in (stop, over)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    reloader.leave()
    await asyncio.wait(waits[1:], timeout=PATIENCE_S)
    for wait in waits:
        wait.cancel()


class EngineChild:
    """The engine's process, started again whenever it ends."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    def end(self) -> int | None:
        """Have it end, since it cannot be trusted any more; gives its pid."""
        process = self._process
        if process is None or process.returncode is not None:
            return None
        with suppress(ProcessLookupError):
            process.terminate()
        return process.pid

    async def run(self, over: asyncio.Event) -> None:
        """Keep it running until `over` is set."""
        waiting = asyncio.create_task(over.wait())
        pause_s = PAUSE_S
        while not over.is_set():
            began = asyncio.get_running_loop().time()
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command, preexec_fn=_end_with_parent, start_new_session=True
            )
            ending = asyncio.create_task(process.wait())
            await asyncio.wait((ending, waiting), return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                self.end()
                await asyncio.wait((ending,), timeout=END_S)
            # Where the server of an engine is killed, the process with its model may live on, and keep its memory.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await ending
            if over.is_set():
                return
            has_run = asyncio.get_running_loop().time() - began > MOST_PAUSE_S
            pause_s = PAUSE_S if has_run else min(2 * pause_s, MOST_PAUSE_S)
            log.warning("the engine ended with code %s, again in %.0f s", process.returncode, pause_s)
            await asyncio.wait((waiting,), timeout=pause_s)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() == 1:  # it ended meanwhile
        os._exit(1)
