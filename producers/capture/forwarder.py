"""Sends the capture log on to `raw`, in order, from one thread.

Invariants: entries are handed to one gapless publisher in the order of their numbers, and the acknowledged position
only moves past entries whose places are known. After any failure or restart everything from that position on is sent
again in the same order under the numbers it was appended with, so what arrives twice falls to the source's high-water
mark; no entry arrives behind one that did not, since the mark would drop the latter for good. What is too large for the
topic is stored as a claim and the claim is sent in its place."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Unanswered

from infra import faults
from infra.bus.base import Bus, Outgoing, Place, Publisher
from infra.claims import LARGEST, ClaimStore
from infra.errors import BusError, TooLargeError
from producers.capture.entry import Kept
from producers.capture.log import CaptureLog

logger = logging.getLogger(__name__)

WINDOW = 2000
BATCH = 256
RELEASE_S = 0.1
IDLE_S = 0.25
FORGET_S = 60.0
BACKOFF_S = (0.1, 5.0)


class Forwarder:
    """Runs from `start` to `close`. `topic` is a full name; a file is kept for `retention_s` once it was sent."""

    def __init__(
        self,
        log: CaptureLog,
        bus: Bus,
        topic: str,
        claims: ClaimStore,
        *,
        max_record: int = LARGEST,
        retention_s: float = 86_400,
    ) -> None:
        self.log = log
        self.bus = bus
        self.topic = topic
        self.claims = claims
        self.max_record = max_record
        self.retention_s = retention_s
        self.failures = 0
        self.failed: Exception | None = None
        """what ended the thread for good"""
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forwarder", daemon=True)
        log.on_append = self._wake.set

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def drained(self, timeout_s: float) -> bool:
        """Wait until everything appended so far was acknowledged; False when it takes longer."""
        target, deadline = self.log.end, time.monotonic() + timeout_s
        while self.log.acked < target and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        return bool(self.log.acked >= target)

    def close(self, timeout_s: float = 10.0) -> None:
        """Send what is there, up to `timeout_s`, and stop. What is left is sent by the next start. Idempotent."""
        if self._thread.is_alive():
            self.drained(timeout_s)
        self._stop.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)  # a client of an unreachable log may take minutes to let go

    def _run(self) -> None:
        pause = BACKOFF_S[0]
        while not self._stop.is_set():
            before = self.log.acked
            try:
                with self.bus.publisher(gapless=True) as publisher:
                    self._forward(publisher)
            except (BusError, OSError) as error:
                self.failures += 1
                pause = BACKOFF_S[0] if self.log.acked > before else min(2 * pause, BACKOFF_S[1])
                logger.warning("forwarding to %s stopped, again in %.1f s: %s", self.topic, pause, error)
                self._stop.wait(pause)
            except Exception as error:
                self.failed = error
                raise

    def _forward(self, publisher: Publisher) -> None:
        cursor = self.log.cursor(self.log.acked)
        window: deque[tuple[Kept, Future[Place]]] = deque()
        released, forgot = time.monotonic(), 0.0
        acked, size = self.log.acked, 0
        try:
            while True:
                self._wake.clear()
                taken = cursor.take(min(BATCH, WINDOW - len(window)))
                for kept in taken:
                    window.append((kept, publisher.publish(self._outgoing(kept))))
                    faults.point("forwarder.published")
                while window and (window[0][1].done() or len(window) >= WINDOW):
                    kept, sent = window.popleft()
                    try:
                        sent.result()
                    except TooLargeError:  # the topic takes less than we thought
                        self.max_record = min(self.max_record, len(kept.entry.value) - 1)
                        raise
                    acked, size = kept.seq + 1, size + kept.size
                now = time.monotonic()
                stopping = self._stop.is_set()
                if acked > self.log.acked and (stopping or not window or now - released > RELEASE_S):
                    self.log.release(acked, size)
                    released, size = now, 0
                if stopping:
                    return
                if now - forgot > FORGET_S:
                    forgot = now
                    self.log.forget(self.retention_s)
                if not taken:
                    self._rest(window)
        finally:
            cursor.close()

    def _rest(self, window: deque[tuple[Kept, Future[Place]]]) -> None:
        """Wait for the next answer, else for the next entry."""
        if not window:
            self._wake.wait(IDLE_S)
            return
        try:
            window[0][1].exception(0.05)
        except Unanswered:
            return

    def _outgoing(self, kept: Kept) -> Outgoing:
        entry, value = kept.entry, self.claims.fitting("Event", kept.entry.value, self.max_record)
        headers = {name: text.encode() for name, text in entry.headers.items()}
        return Outgoing(self.topic, entry.key.encode(), value, headers)
