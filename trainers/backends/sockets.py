"""The sockets of a gloo process group, and how to close them by hand.

gloo keeps its connections until the last reference to the group dies, and its abort calls do not unblock a collective;
a peer that waits on a group we left would sit there to its timeout. Shutting the sockets down ends the wait on both
sides at once.

How gloo's sockets are told from others: every rank publishes the port on which its gloo listens; a connection is gloo's
when our end has our port, or the other end a peer's. So connections that other threads open meanwhile (a Kafka
client's) are never touched. The listening socket is left alone: shutting it down ends the process.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from torch.distributed.distributed_c10d import Store


def open_sockets() -> dict[int, str]:
    """fd -> kernel name of every socket that this process holds."""
    names = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                names[int(name)] = target
    return names


class GroupSockets:
    """Records the sockets of one process group: make it before the group, call `record` after."""

    def __init__(self) -> None:
        self._before = set(open_sockets().values())
        self._sockets: dict[int, str] = {}

    def record(self, store: Store, rank: int, world: int) -> None:
        """Find the group's sockets. All ranks call it; it waits for each peer's port in `store`."""
        fresh = {fd: name for fd, name in open_sockets().items() if name not in self._before}
        listening, links = [], {}
        for fd in fresh:
            ends = _ends(fd)
            if ends is None:
                continue
            here, there = ends
            if there is None:
                listening.append(here)
            else:
                links[fd] = (here, there)
        store.set(f"gloo-ports/{rank}", ",".join(str(port) for port in listening))
        peer_ports = {
            int(port)
            for peer in range(world)
            if peer != rank
            for port in store.get(f"gloo-ports/{peer}").decode().split(",")
            if port
        }
        own_ports = set(listening)
        self._sockets = {
            fd: fresh[fd] for fd, (here, there) in links.items() if here in own_ports or there in peer_ports
        }

    def __len__(self) -> int:
        return len(self._sockets)

    def close(self) -> None:
        """Shuts the recorded connections down; those already closed (or whose fd was reused) are left alone."""
        for fd, name in self._sockets.items():
            try:
                copy = os.dup(fd)
            except OSError:
                continue
            try:
                if os.readlink(f"/proc/self/fd/{copy}") != name:
                    continue
                with socket.socket(fileno=os.dup(copy)) as connection, suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                os.close(copy)
        self._sockets = {}


def _ends(fd: int) -> tuple[int, int | None] | None:
    """(own port, peer's port or None when listening) of a TCP socket; None for anything else."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    with socket.socket(fileno=copy) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return None
        here = connection.getsockname()[1]
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return here, None
        try:
            return here, connection.getpeername()[1]
        except OSError:
            return None
