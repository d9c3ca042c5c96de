"""What a learner says of itself in `workers`: alive, where, at which version.

Invariants: one thread publishes, soon after a change and before the status expires, at most once a second; a log that
does not answer never stops learning; leaving is said too.
"""

from __future__ import annotations

import logging
import os
import socket
import threading

from infra.bus.base import Bus
from infra.errors import BusError
from infra.workers import status
from schemas.ids import new_id
from schemas.records import WorkerState

BEAT_S = 5.0
QUIET_S = 1.0
"""at least between two statuses"""
TTL_S = 15.0
FLUSH_S = 2.0

log = logging.getLogger(__name__)


class Heartbeat:
    """Renews one learner's WorkerStatus until `close`."""

    def __init__(self, bus: Bus, topic: str, policy: str, url: str) -> None:
        self._publisher = bus.publisher()
        self._topic = topic
        self._policy = policy
        self._url = url
        self._worker = f"learner-{socket.gethostname()}-{os.getpid()}"
        self._incarnation = new_id()
        self._standing: tuple[WorkerState, int | None, str | None] = ("starting", None, None)
        self._changed = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def say(self, state: WorkerState, version: int | None = None, error: str | None = None) -> None:
        """From now on this is the status."""
        self._standing = (state, version, error)
        self._changed.set()

    def close(self, error: str | None = None) -> None:
        """Say that this learner has stopped, or failed with `error`, and end."""
        self.say("failed" if error else "stopped", None, error)
        self._over.set()
        self._changed.set()
        self._thread.join()
        self._publisher.close()

    def _run(self) -> None:
        while not self._over.wait(QUIET_S):
            self._changed.clear()
            self._publish()
            self._changed.wait(BEAT_S)
        self._publish()

    def _publish(self) -> None:
        state, version, error = self._standing
        said = status(
            self._topic,
            worker=self._worker,
            incarnation=self._incarnation,
            role="learner",
            state=state,
            policy=self._policy,
            lives_s=TTL_S,
            version=version,
            url=self._url,
            error=error,
        )
        try:
            self._publisher.publish(said)
            self._publisher.flush(FLUSH_S)
        except BusError as problem:
            log.warning("the log does not take this learner's status: %s", problem)
