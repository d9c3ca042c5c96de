"""Where the time of a step goes.

Invariant: phases are exclusive. Time inside a nested phase belongs to the inner one alone, so phases add up to the
whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COLLECTIVES = "collectives"
"""The phase in which ranks exchange tensors."""


class Clock:
    """Exclusive seconds by phase. `sync` runs before each reading; devices that work asynchronously need it."""

    def __init__(self, sync: Callable[[], None] = lambda: None) -> None:
        self._sync = sync
        self._stack: list[str] = []
        self._mark = 0.0
        self.seconds: dict[str, float] = {}

    def _credit(self) -> None:
        self._sync()
        now = time.perf_counter()
        if self._stack:
            top = self._stack[-1]
            self.seconds[top] = self.seconds.get(top, 0.0) + now - self._mark
        self._mark = now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Credits the time inside the block to `name`, and takes it from the phase around it."""
        self._credit()
        self._stack.append(name)
        try:
            yield
        finally:
            self._credit()
            self._stack.pop()

    def drain(self) -> dict[str, float]:
        """Seconds by phase since the last drain."""
        self._credit()
        seconds, self.seconds = self.seconds, {}
        return seconds
