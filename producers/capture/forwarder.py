"""Sends the capture log on to `raw`, in order, from one thread.

Invariants: entries are handed to one gapless publisher in the order of their numbers, and the acknowledged position
only moves past entries whose places are known. After any failure or restart everything from that position on is sent
again in the same order under the numbers it was appended with, so what arrives twice falls to the source's high-water
mark; no entry arrives behind one that did not, since the mark would drop the latter for good. What is too large for the
topic is stored as a claim and the claim is sent in its place; what the log refuses as such, alone and as a claim, is
replaced (`capture.refused`) and the rest goes on. What else refuses an entry (a log that is away or lets nobody in, a
storage, the disk) says nothing about it: it is tried again until it is taken. Only a capture log that lacks an entry
ends the thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Unanswered

from millrace.infra import faults
from millrace.infra.errors import BadRecordError, BusError, ClaimError, GatewayError, TooLargeError
from millrace.infra.log.base import Bus, Outgoing, Place, Publisher
from millrace.infra.log.blobs import LARGEST, ClaimStore
from millrace.producers.capture.cursor import CaptureCursor
from millrace.producers.capture.entry import StoredEntry
from millrace.producers.capture.log import CaptureLog
from millrace.producers.capture.rejection import RefusedEntries

logger = logging.getLogger(__name__)

WINDOW = 2000
BATCH = 256
RELEASE_S = 0.1
"""how often it is noted how far it came: each time is a file written anew"""
IDLE_S = 0.25
GATHER_S = 0.01
"""entries that come this soon after each other are sent together: each waking takes time from the event loop"""
FORGET_S = 60.0
BACKOFF_S = (0.1, 5.0)
PATIENCE_S = 600.0
"""how long an entry may be refused for a reason that nobody knows, sent alone, until it counts as refused as such"""


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
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.log = log
        self.bus = bus
        self.topic = topic
        self.claims = claims
        self.max_record = max_record
        self.retention_s = retention_s
        self.patience_s = patience_s
        self.refused = RefusedEntries(log)
        self.failures = 0
        self.failed: Exception | None = None
        """what ended the thread for good"""
        self._unnoted = False
        self._single = -1
        """entries up to this number are sent one at a time: what fails together does not tell whose fault it was"""
        self._claimed = -1
        """the entry that is sent as a claim because the topic takes less than we thought"""
        self._unknown = (-1, 0.0)
        """the entry that is refused for a reason that nobody knows, and since when"""
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forwarder", daemon=True)
        log.on_append = self._wake.set

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything appended so far was acknowledged; False when it takes longer."""
        target, deadline = self.log.end, time.monotonic() + timeout_s
        while self.log.acked < target and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        return bool(self.log.acked >= target)

    def close(self, timeout_s: float = 10.0) -> None:
        """Send what is there, up to `timeout_s`, and stop. What is left is sent by the next start. Idempotent."""
        if self._thread.is_alive():
            self.drain(timeout_s)
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
            except GatewayError as error:  # the log itself must be looked at by a start
                self.failed = error
                raise
            except Exception as error:
                # A storage of claims has errors of its own. None may end the gateway, which would meet it again.
                self.failures += 1
                pause = BACKOFF_S[0] if self.log.acked > before else min(2 * pause, BACKOFF_S[1])
                is_known = isinstance(error, BusError | ClaimError | OSError)
                logger.log(
                    logging.WARNING if is_known else logging.ERROR,
                    "forwarding to %s stopped at entry %d, again in %.1f s: %s: %s",
                    self.topic,
                    self.log.acked,
                    pause,
                    type(error).__name__,
                    error,
                    exc_info=not is_known,
                )
                self._stop.wait(pause)

    def _forward(self, publisher: Publisher) -> None:
        source = _Source(self.log)
        window: deque[tuple[StoredEntry, Future[Place]]] = deque()
        last_release, last_forget = time.monotonic(), 0.0
        position, size = self.log.acked, 0
        try:
            while True:
                self._wake.clear()
                items = source.take(room) if (room := self._room(source.seq, len(window))) else []
                for item in items:
                    window.append((item, publisher.publish(self._outgoing(item))))
                    faults.point("forwarder.published")
                while window and (window[0][1].done() or len(window) >= WINDOW):
                    item, place = window.popleft()
                    try:
                        place.result()
                    except BusError as error:
                        self._judge(item, error, [one for _, one in window], source.seq - 1)
                        raise
                    if item.seq == self._claimed:
                        self.max_record = min(self.max_record, len(item.entry.value) - 1)
                    position, size = item.seq + 1, size + item.size
                now = time.monotonic()
                stopping = self._stop.is_set()
                if position > self.log.noted and (stopping or now - last_release > RELEASE_S):
                    self._release(position, size)
                    last_release, size = now, 0
                if stopping:
                    return
                if now - last_forget > FORGET_S:
                    last_forget = now
                    self.log.forget(self.retention_s)
                if not items:
                    self._rest(window, RELEASE_S if position > self.log.noted else IDLE_S)
        finally:
            source.close()

    def _room(self, seq: int, waiting: int) -> int:
        """How many entries may be handed over from number `seq` on."""
        return min(BATCH, WINDOW - waiting) if seq > self._single else int(not waiting)

    def _judge(self, item: StoredEntry, error: BusError, futures: list[Future[Place]], last: int) -> None:
        """What the next round does about an entry that failed first, of those up to number `last` that were handed
        over."""
        if item.seq > self._single:
            is_bad = any(isinstance(one.exception(), BadRecordError) for one in futures if one.done())
            self._single = last if is_bad or isinstance(error, BadRecordError) else item.seq
        elif isinstance(error, TooLargeError) and self._may_be_claimed(item):
            self._claimed = item.seq
        elif isinstance(error, BadRecordError) or (type(error) is BusError and self._lasts(item.seq)):
            if item in self.refused:
                logger.error("%s refuses even a small event in the place of entry %d", self.topic, item.seq)
            else:
                self.refused.add(item, error)
                self._claimed = -1  # no claim was taken in its place, which would tell how much the topic takes
                faults.point("forwarder.refused")

    def _may_be_claimed(self, item: StoredEntry) -> bool:
        """Whether the entry was sent whole."""
        return item.seq != self._claimed and len(item.entry.value) <= self.max_record and item not in self.refused

    def _lasts(self, seq: int) -> bool:
        """Whether an entry has been refused for an unknown reason for long enough."""
        now = time.monotonic()
        if self._unknown[0] != seq:
            self._unknown = (seq, now)
        return now - self._unknown[1] >= self.patience_s

    def _release(self, position: int, size: int) -> None:
        """Note how far it came. A disk that does not take that holds nothing up: it is noted later, and until then a
        start sends more again."""
        try:
            self.log.release(position, size)
            self._unnoted = False
        except OSError as error:
            if not self._unnoted:
                logger.warning("the position of %s cannot be written, sending on: %s", self.log.folder, error)
            self._unnoted = True

    def _rest(self, window: deque[tuple[StoredEntry, Future[Place]]], idle_s: float) -> None:
        """Wait for the next answer, else for the next entry, up to `idle_s`."""
        if not window:
            if self._wake.wait(idle_s):
                self._stop.wait(GATHER_S)
            return
        try:
            window[0][1].exception(0.05)
        except Unanswered:
            return

    def _outgoing(self, item: StoredEntry) -> Outgoing:
        entry = self.refused.sent_for(item)
        largest = 0 if item.seq == self._claimed else self.max_record
        value = self.claims.fitting("Event", entry.value, largest) if entry is item.entry else entry.value
        headers = {name: text.encode() for name, text in entry.headers.items() if name[0] != "_"}
        return Outgoing(self.topic, entry.key.encode(), value, headers)


class _Source:
    """The log from where it was acknowledged: what was just appended as it is, the rest from its files."""

    def __init__(self, log: CaptureLog) -> None:
        self._log = log
        self.seq = log.acked
        self._cursor: CaptureCursor | None = None

    def take(self, most: int) -> list[StoredEntry]:
        """At most so many entries; [] at the end of the log."""
        items: list[StoredEntry] = []
        if self._cursor is None:
            items = self._log.recent.take(self.seq, most)
        if not items and self.seq < self._log.end:
            self._cursor = self._cursor or self._log.cursor(self.seq)
            items = self._cursor.take(most)
        elif not items:
            self.close()  # all is read: what comes next is handed over
        if items:
            self.seq = items[-1].seq + 1
        return items

    def close(self) -> None:
        """Let go of the files. Idempotent."""
        if self._cursor is not None:
            self._cursor.close()
            self._cursor = None
