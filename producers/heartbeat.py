"""Says in `workers` that a process lives, from a thread of its own: an unreachable log must hold nothing up."""

from __future__ import annotations

import logging
import threading

from infra.bus.base import Bus, Outgoing
from infra.errors import BusError
from infra.topics import full_name
from infra.workers import status
from schemas.ids import new_id
from schemas.records import WorkerState

logger = logging.getLogger(__name__)

BEAT_S = 2.0
TTL_S = 8.0


class Heartbeat:
    """Beats from `start` to `close`, where it says that the worker stopped. `url`: where it listens, if anywhere."""

    def __init__(
        self, bus: Bus, namespace: str, *, worker: str, role: str, policy: str, url: str | None = None
    ) -> None:
        self._bus = bus
        self._topic = full_name(namespace, "workers")
        self._worker, self._role, self._policy, self._url = worker, role, policy, url
        self._incarnation = new_id()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Beat a last time and stop; gives up when the log does not answer."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._bus.publisher() as publisher:
                    while not self._stop.is_set():
                        publisher.publish(self._status("serving", TTL_S)).result()
                        self._stop.wait(BEAT_S)
                    publisher.publish(self._status("stopped", 0.0)).result()
            except BusError as error:
                logger.warning("%s cannot say that it lives: %s", self._worker, error)
                self._stop.wait(BEAT_S)

    def _status(self, state: WorkerState, lives_s: float) -> Outgoing:
        return status(
            self._topic,
            worker=self._worker,
            incarnation=self._incarnation,
            role=self._role,
            state=state,
            policy=self._policy,
            lives_s=lives_s,
            url=self._url,
        )
