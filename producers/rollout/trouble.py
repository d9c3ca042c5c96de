"""How an agent does: a bug in it must not burn the tasks.

Invariant: after `IN_A_ROW` failures in a row no new work begins but one trial after another, until one succeeds.
Running out of time is no such failure: a hard task may need it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

logger = logging.getLogger(__name__)

IN_A_ROW = 16
TRIAL_S = 10.0
"""between two trials of an agent that failed"""


class Trouble:
    """What one agent's episodes came to. Use it in one event loop; other threads may read `broken` and `said`."""

    def __init__(self, in_a_row: int = IN_A_ROW, trial_s: float = TRIAL_S) -> None:
        self.in_a_row, self.trial_s = in_a_row, trial_s
        self.failures = 0
        self.said = ""
        """what to tell of an agent that is broken; empty for others"""
        self._shown = ""
        self._trial = asyncio.Lock()

    @property
    def broken(self) -> bool:
        """Whether it failed too often in a row."""
        return self.failures >= self.in_a_row

    def failed(self, episode: str, error: Exception) -> None:
        """The agent raised: its trace is shown once for each kind of error."""
        self.failures += 1
        said = f"{type(error).__name__}: {error}"
        if type(error).__name__ != self._shown:
            self._shown = type(error).__name__
            logger.error("episode %s: the agent failed: %s", episode, said, exc_info=error)
        else:
            logger.info("episode %s: the agent failed: %s", episode, said)
        if self.failures == self.in_a_row:
            logger.error(
                "the agent failed %d times in a row (%s): no new tasks until a trial succeeds; mend it, then restart "
                "this role",
                self.failures,
                said,
            )
        if self.broken:
            self.said = f"the agent failed {self.failures} times in a row: {said}"

    def went_well(self) -> None:
        """An episode of the agent's ended without an error."""
        self.failures, self.said, self._shown = 0, "", ""

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Enter to run one episode: at once, or as the next trial."""
        if not self.broken:
            yield
            return
        async with self._trial:
            if self.broken:
                await asyncio.sleep(self.trial_s)
            yield
