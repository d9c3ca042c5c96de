"""How an agent does: a bug in it must not burn the tasks.

Invariant: after `IN_A_ROW` failures in a row no new work begins but one trial after another, until one succeeds.
Running out of time is no such failure: a hard task may need it. A worker whose agent keeps `STUCK_LIMIT` threads is to
be started anew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager

logger = logging.getLogger(__name__)

IN_A_ROW = 16
TRIAL_S = 10.0
"""between two trials of an agent that failed"""
STUCK_LIMIT = 64
"""calls past their deadline that still keep a thread: each may use memory and processor time"""


class Trouble:
    """What one agent's episodes came to. Use it in one event loop; other threads may read."""

    def __init__(self, in_a_row: int = IN_A_ROW, trial_s: float = TRIAL_S, stuck_limit: int = STUCK_LIMIT) -> None:
        self.in_a_row, self.trial_s, self.stuck_limit = in_a_row, trial_s, stuck_limit
        self.failures = 0
        self.message = ""
        """what to tell of an agent that is broken; empty for others"""
        self.stuck: set[Future[None]] = set()
        """ends of the calls that were given up and have not returned yet"""
        self._shown = ""
        self._trial = asyncio.Lock()

    @property
    def is_broken(self) -> bool:
        """Whether it failed too often in a row."""
        return self.failures >= self.in_a_row

    @property
    def is_worn(self) -> bool:
        """Whether too many of its calls never returned."""
        return len(self.stuck) >= self.stuck_limit

    def note_failure(self, episode: str, error: Exception) -> None:
        """The agent raised: its trace is shown once for each kind of error."""
        self.failures += 1
        text = f"{type(error).__name__}: {error}"
        if type(error).__name__ != self._shown:
            self._shown = type(error).__name__
            logger.error("episode %s: the agent failed: %s", episode, text, exc_info=error)
        else:
            logger.info("episode %s: the agent failed: %s", episode, text)
        if self.failures == self.in_a_row:
            logger.error(
                "the agent failed %d times in a row (%s): no new tasks until a trial succeeds; mend it, then restart "
                "this role",
                self.failures,
                text,
            )
        if self.is_broken:
            self.message = f"the agent failed {self.failures} times in a row: {text}"

    def note_success(self) -> None:
        """An episode of the agent's ended without an error."""
        self.failures, self.message, self._shown = 0, "", ""

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Enter to run one episode: at once, or as the next trial."""
        if not self.is_broken:
            yield
            return
        async with self._trial:
            if self.is_broken:
                await asyncio.sleep(self.trial_s)
            yield
