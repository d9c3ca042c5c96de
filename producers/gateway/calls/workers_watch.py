"""Follows the topic `workers`, so that a gateway knows which engines serve, and what version each has.

Invariant: a broker that cannot be reached, and a record that nobody can read, end nothing: it goes on where it was."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from millrace.infra.errors import BusError
from millrace.infra.log.base import EARLIEST, Bus, Record
from millrace.infra.log.readable import readable
from millrace.schemas.records import WorkerStatus

logger = logging.getLogger(__name__)


class WorkersWatch:
    """Follows `workers` in a thread and hands each status to `observe` in the event loop."""

    def __init__(
        self, bus: Bus, topic: str, loop: asyncio.AbstractEventLoop, observe: Callable[[WorkerStatus], None]
    ) -> None:
        self._bus = bus
        self._topic = topic
        self._loop = loop
        self._observe = observe
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="workers-watch", daemon=True)

    def start(self) -> None:
        """Begin to follow, from the first status kept."""
        self._thread.start()

    def close(self) -> None:
        """Stop. Idempotent."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        position = EARLIEST
        while not self._stop.is_set():
            try:
                with self._bus.tail({(self._topic, 0): position}) as tail:
                    while not self._stop.is_set():
                        for record in tail.poll(500, 0.2):
                            self._hand_over(record)
                        position = tail.positions()[(self._topic, 0)]
            except BusError as error:
                logger.warning("following %s stopped, again in 1 s: %s", self._topic, error)
                self._stop.wait(1.0)

    def _hand_over(self, record: Record) -> None:
        status = None if record.value is None else readable(WorkerStatus, record)
        if status is not None:
            with suppress(RuntimeError):  # the loop was closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._observe, status)
