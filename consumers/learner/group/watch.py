"""The watchdog: while this process blocks on its peers, it looks whether they still belong to the group.

A collective, and torch's store client, wait for a frozen peer as long as their timeouts say (the store's `check` for
ever: measured). The group's coordinator notices a frozen peer when its session ends, so the watchdog asks it. All it
may do is close sockets, which makes whatever blocks here fail at once.

Invariants: one thread a process; it breaks a generation at most once; it never touches the consumer.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from millrace.consumers.learner.group.agreement import Roster
from millrace.infra.errors import BusError
from millrace.infra.log.base import Bus
from millrace.trainers.backends.sockets import open_sockets

EVERY_S = 0.5


class Watchdog:
    """Watches over one generation at a time."""

    def __init__(self, bus: Bus, group: str, abort: Callable[[], None]) -> None:
        self._bus = bus
        self._group = group
        self._abort = abort
        self._lock = threading.Lock()
        self._roster: Roster | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def watch(self, roster: Roster) -> None:
        """From now on the members of `roster` must stay in the group."""
        with self._lock:
            self._roster = roster

    def rest(self) -> None:
        """Stop watching; returns only when nothing will be closed any more."""
        with self._lock:
            self._roster = None

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            roster = self._roster
            if roster is None or roster.world == 1:
                continue
            with suppress(BusError):  # a log that does not answer proves nothing about the peers
                present = {member.member_id for member in self._bus.group(self._group).members}
                peers = [peer for peer in roster.peers if peer.member_id not in present]
                if peers:
                    self._break(roster)

    def _break(self, roster: Roster) -> None:
        with self._lock:
            if self._roster is not roster:
                return
            self._roster = None
            self._abort()
            if roster.rank != 0:
                cut(roster.leader.host, roster.leader.port)


def cut(host: str, port: int) -> None:
    """Shut down every connection of this process to `host`:`port`."""
    address = socket.gethostbyname(host)
    for fd in open_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and _is_peer(one.getpeername(), address, port):
                one.shutdown(socket.SHUT_RDWR)


def _is_peer(peer: tuple[str, int], address: str, port: int) -> bool:
    return peer[1] == port and peer[0].removeprefix("::ffff:") == address
