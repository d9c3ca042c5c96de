"""Clients that fell silent: found by what they hear, and told, so that they make themselves anew.

A client library can lose every broker it knows and never look for another (a broker that was frozen with its clients
names no broker at all in its first answer). It then waits for ever, without an error.

Invariants: a client counts as silent only while something is due to it, while this process itself ran without a gap,
and while a client made for the purpose is answered, twice; brokers that answer nobody are waited for. The judgement
(`Vigil`) is pure; `ClientWatcher` is the thread around it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar

log = logging.getLogger(__name__)

SILENT_S = 20.0
"""a client that nothing reached for so long is suspected"""
HANGS_S = 90.0
"""a call that has time limits of its own and takes so long will never return"""
LOOK_S = 2.0
GAP_S = 5.0
"""a longer pause between two looks, or two polls, means that this process did not run, or did not ask"""
REPORT_MS = 2000
"""how often a client reports what it received"""
ENDS = 75
"""exit code of a process that a hanging call holds"""


class Pulse:
    """What is known of one client's life. Threads may share it."""

    def __init__(self, name: str, limit_s: float = SILENT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.what, self.limit_s, self._clock = name, limit_s, clock
        self._received = -1
        self._since = clock()
        self._asked = float("-inf")
        self.busy = False
        """whether something is due for as long as this is set"""
        self.lost = False
        """the judgement: this client hears nothing while others do"""

    def note_report(self, text: str) -> None:
        """A report of the client's (`stats_cb`): answers that it received so far."""
        count = int(json.loads(text).get("rx", 0))
        if count != self._received:
            self._received = count
            self.restart()

    def restart(self) -> None:
        """An answer arrived, or nothing is due: the wait begins anew."""
        self._since = self._clock()

    def note_wait(self) -> None:
        """Somebody waits for the client now."""
        now = self._clock()
        if now - self._asked > GAP_S:
            self._since = now
        self._asked = now

    def silent_s(self, now: float) -> float:
        """For how long nothing came although it was due; 0 when nothing is due."""
        is_due = self.busy or now - self._asked <= GAP_S
        return max(0.0, now - self._since) if is_due else 0.0

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Something is due for the length of this call."""
        self.restart()
        self.busy = True
        try:
            yield
        finally:
            self.busy = False


class Silence(Protocol):
    """A `Pulse`, as far as the judgement goes."""

    limit_s: float

    def silent_s(self, now: float) -> float: ...


ClientT = TypeVar("ClientT", bound=Silence)


class Vigil:
    """Judges clients look by look."""

    def __init__(self) -> None:
        self._looked: float | None = None
        self._from = float("-inf")
        self._proofs = 0

    def suspects(self, now: float, clients: Sequence[ClientT]) -> list[ClientT]:
        """Those that have been silent too long, of which this process was awake all the time."""
        if self._looked is not None and now - self._looked > GAP_S:
            self._from = now
        self._looked = now
        candidates = [c for c in clients if min(c.silent_s(now), now - self._from) > c.limit_s]
        if not candidates:
            self._proofs = 0
        return candidates

    def are_lost(self, now: float, was_answered: bool) -> bool:
        """Whether the suspects are lost, now that another client was answered or not."""
        if not was_answered:
            self._from, self._proofs = now, 0
            return False
        self._proofs += 1
        return self._proofs >= 2


class ClientWatcher:
    """Looks after the clients of one bus. `probe` says whether the brokers answer a client made for the purpose."""

    def __init__(self, probe: Callable[[], bool], end: Callable[[int], None] = os._exit) -> None:
        self._probe, self._end = probe, end
        self._vigil = Vigil()
        self._pulses: list[Pulse] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, pulse: Pulse) -> Pulse:
        """Look after a client until it is `forget`-ed."""
        with self._lock:
            self._pulses.append(pulse)
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="kafka-watcher", daemon=True)
                self._thread.start()
        return pulse

    def forget(self, pulse: Pulse) -> None:
        """The client is closed."""
        with self._lock, suppress(ValueError):
            self._pulses.remove(pulse)

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """One look at every client."""
        with self._lock:
            pulses = [pulse for pulse in self._pulses if not pulse.lost]
        suspects = self._vigil.suspects(now, pulses)
        if not suspects or not self._vigil.are_lost(now, self._probe()):
            return
        for pulse in suspects:
            log.error(
                "%s heard nothing from the broker for %.0f s, which answers others: the client is made anew",
                pulse.what,
                pulse.silent_s(now),
            )
            pulse.lost = True
        if any(pulse.limit_s == HANGS_S for pulse in suspects):
            log.error("a call to the broker hangs for ever: this process ends, and its supervisor starts it again")
            self._end(ENDS)
