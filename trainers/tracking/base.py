"""The seam of trackers: the numbers of a run, one point a step.

Invariants every sibling keeps: a step that has its point gets no second one, whoever logs it again and in whichever
process (a run that was killed and goes on repeats steps); what `log` returned from can be read back by others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping


class Tracker(ABC):
    """The points of one run in one directory. Used from one thread, by one process at a time."""

    @property
    @abstractmethod
    def last(self) -> int:
        """The newest step that has its point, -1 before any."""

    def log(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Records the finite ones of `metrics` at `step`, unless a step from it on has its point already; whether it
        did."""
        if step <= self.last:
            return False
        self._write(step, {name: float(value) for name, value in sorted(metrics.items()) if math.isfinite(value)})
        return True

    @abstractmethod
    def close(self) -> None:
        """Lets go of what it holds. Idempotent."""

    @abstractmethod
    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Makes a new point durable against the end of this process."""
