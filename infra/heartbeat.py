"""Says in `workers` how a process is, from a thread of its own.

Invariants: a status is renewed before it lapses, soon after a change, and never more often than its pace allows; a log
that does not answer holds nothing up; how the process ended is said too. (An engine has no thread here: its reloader
says how it is, and only while the engine answers.)"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from millrace.infra.errors import BusError, UnreachableError
from millrace.infra.log.base import Bus, Publisher
from millrace.infra.log.topics import full_name
from millrace.infra.workers import status
from millrace.schemas.ids import new_id
from millrace.schemas.records import WorkerState

logger = logging.getLogger(__name__)

FLUSH_S = 2.0
"""how long one status may take to be written"""
MOST = 300
"""characters of what is told of a trouble"""


class Standing(NamedTuple):
    """How a process is: its state, the version that it holds, why it cannot work."""

    state: WorkerState
    version: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class BeatPace:
    """Seconds. beat_s: between two statuses while nothing changes; lives_s: how long each holds; quiet_s: at least
    between two statuses; farewell_s: how long the last one holds."""

    beat_s: float = 2.0
    lives_s: float = 8.0
    quiet_s: float = 0.0
    farewell_s: float = 0.0


SERVING = partial(Standing, "serving")
EVEN = BeatPace()


def unless_in(trouble: Callable[[], str]) -> Callable[[], Standing]:
    """Serving, or failed while `trouble` says why the process cannot work now; it is empty when it can."""

    def standing() -> Standing:
        fault = trouble()
        return Standing("failed", None, fault[:MOST]) if fault else Standing("serving")

    return standing


class Heartbeat:
    """Beats from `start` to `close`. `standing` is asked at each beat how the process is, until `say` tells."""

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        *,
        worker: str,
        role: str,
        policy: str,
        url: str | None = None,
        standing: Callable[[], Standing] = SERVING,
        pace: BeatPace = EVEN,
    ) -> None:
        """`url`: where it listens, if anywhere."""
        self._bus = bus
        self._worker = worker
        self._standing = standing
        self._pace = pace
        self._status = partial(
            status,
            full_name(namespace, "workers"),
            worker=worker,
            incarnation=new_id(),
            role=role,
            policy=policy,
            url=url,
        )
        self._changed = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def say(self, state: WorkerState, version: int | None = None, error: str | None = None) -> None:
        """From now on the process is so."""
        self._standing = partial(Standing, state, version, error)
        self._changed.set()

    def close(self, timeout_s: float = 2.0, error: str | None = None) -> None:
        """Say that the process has stopped, or failed with `error`, and end; gives up when the log does not answer."""
        self.say("failed" if error else "stopped", None, error)
        self._over.set()
        self._changed.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                with self._bus.publisher() as publisher:
                    self._beat(publisher)
            except BusError as error:
                logger.warning("%s cannot say how it is: %s", self._worker, error)
                self._over.wait(self._pace.beat_s)

    def _beat(self, publisher: Publisher) -> None:
        while not self._over.wait(self._pace.quiet_s):
            self._changed.clear()
            self._publish(publisher, self._pace.lives_s)
            self._changed.wait(self._pace.beat_s)
        self._publish(publisher, self._pace.farewell_s)

    def _publish(self, publisher: Publisher, lives_s: float) -> None:
        state, version, error = self._standing()
        future = publisher.publish(self._status(state=state, version=version, error=error, lives_s=lives_s))
        try:
            publisher.flush(FLUSH_S)
        except UnreachableError as late:
            logger.warning("%s: the log does not take its status yet: %s", self._worker, late)
        else:
            future.result()
