"""Follows `principals` in a thread, so that what a key may do is known here within two seconds of its record.

Invariants: what was read stays in force while the log does not answer, for `TRUST_S` and no longer: from then on no
key of the log is believed; a log without the topic has no keys, but a topic that is gone takes back nothing; a key's
use is written at most once in `USE_S`, and says nothing but that."""

from __future__ import annotations

import getpass
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from millrace.infra.config import Settings
from millrace.infra.errors import BusError, TopicError
from millrace.infra.local_keys import pepper_of
from millrace.infra.log.base import EARLIEST, Bus
from millrace.infra.log.readable import readable
from millrace.infra.log.topics import full_name
from millrace.infra.principals.book import KeyVerdict, PrincipalBook, act_record, outgoing
from millrace.schemas.ids import now_micros
from millrace.schemas.records import Principal

logger = logging.getLogger(__name__)

TOPIC = "principals"
TRUST_S = 900.0
LOOK_S = 5.0
"""between two looks whether the log answers at all"""
USE_S = 3600
AGAIN_S = 0.5


class PrincipalWatch:
    """Keeps a book. on_change: called in the thread of the watch after records came."""

    def __init__(
        self, bus: Bus, settings: Settings, author: str, on_change: Callable[[PrincipalBook], None] | None = None
    ) -> None:
        self.book = PrincipalBook()
        self.ready = threading.Event()
        """the log was read up to where it ended once"""
        self._bus, self._topic = bus, full_name(settings.namespace, TOPIC)
        self._settings, self._author, self._pepper = settings, author, pepper_of(settings)
        self.on_change = on_change
        self._heard = 0.0
        self._uses: dict[str, int] = {}
        self._is_foreign = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="principals-watch", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def close(self) -> None:
        """Stop, what was used written. Idempotent."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def is_trusted(self) -> bool:
        """Whether what the book says is new enough to act on."""
        return self.ready.is_set() and time.monotonic() - self._heard < TRUST_S

    @property
    def asks_for_keys(self) -> bool:
        """Whether keys were ever made, as far as is known: then nobody comes in without one, also once all are
        revoked. Before the log was read, whether a pepper lies here."""
        return self.book.has_keys or (bool(self._pepper) and not self.ready.is_set())

    def verify(self, key: str) -> KeyVerdict:
        """Whose key this is now; its use is noted."""
        now = now_micros()
        verdict = self.book.verify(key, self._pepper, now)
        if verdict.standing == "live" and verdict.grant is not None:
            self._uses[verdict.grant["id"]] = now
        return verdict

    def _run(self) -> None:
        position = EARLIEST
        while not self._stop.is_set():
            try:
                end, answered = self._bus.ends(self._topic)[0], time.monotonic()
                with self._bus.tail({(self._topic, 0): position}) as tail:
                    while not self._stop.is_set():
                        records = tail.poll(500, 0.2)
                        for record in records:
                            if record.value is not None and (row := readable(Principal, record)) is not None:
                                self.book.fold(row)
                        position = tail.positions()[(self._topic, 0)]
                        if records:
                            answered = time.monotonic()
                            self._tell()
                        if max(position, 0) >= end:
                            self._heard = answered
                            self.ready.set()
                        if time.monotonic() - answered > LOOK_S:
                            end, answered = self._bus.ends(self._topic)[0], time.monotonic()
                            self._pepper = pepper_of(self._settings)
                        self._write_uses()
                    self._write_uses()
            except TopicError:
                if not self.book.has_keys:
                    self._heard = time.monotonic()
                    self.ready.set()
                self._stop.wait(AGAIN_S)
            except BusError as error:
                logger.warning("following %s stopped, again in %g s: %s", self._topic, AGAIN_S, error)
                self._stop.wait(AGAIN_S)

    def _tell(self) -> None:
        self._pepper = pepper_of(self._settings)
        is_foreign = bool(self.book.foreign_ids(self._pepper, now_micros()))
        if is_foreign and not self._is_foreign:
            logger.error(
                "keys of clients were made with another pepper than this machine has, and are refused here: copy "
                "keys/pepper under home from where `millrace key` runs, or set [gateway] pepper"
            )
        self._is_foreign = is_foreign
        if self.on_change is not None:
            self.on_change(self.book)

    def _write_uses(self) -> None:
        """Write the uses that the log does not have yet. Which they were is forgotten first: where the log does not
        take them, they are told an hour later."""
        fresh = []
        while self._uses:
            id, at = self._uses.popitem()  # other threads only add
            if at - (self.book.last_use(id) or 0) >= USE_S * 1_000_000:
                fresh.append(act_record("use", id, at, self._author))
                self.book.fold(fresh[-1])
        if fresh:
            with self._bus.publisher() as publisher:
                for record in fresh:
                    publisher.publish(outgoing(self._topic, record))
                publisher.flush()


def read_book(bus: Bus, namespace: str) -> PrincipalBook:
    """What the log says now; of a log without the topic, nothing."""
    book = PrincipalBook()
    with suppress(TopicError):
        for record in bus.read(full_name(namespace, TOPIC), 0):
            if record.value is not None and (row := readable(Principal, record)) is not None:
                book.fold(row)
    return book


def user_name() -> str:
    """Who runs this process, as an author of records."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return f"unknown@{socket.gethostname()}"
