"""Ports and waiting: what every local service needs."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from millrace.infra.errors import ServiceError

LOCALHOST = "127.0.0.1"


def is_local(host: str) -> bool:
    """Whether an address is reachable from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def free_ports(count: int, host: str = LOCALHOST) -> list[int]:
    """`count` different ports nobody listens on now (held together while they are chosen, so that they differ)."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((host, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def is_listening(host: str, port: int, timeout_s: float = 0.5) -> bool:
    """Whether something accepts connections there."""
    with socket.socket() as one:
        one.settimeout(timeout_s)
        return one.connect_ex((host, port)) == 0


def socket_dir(home: Path) -> Path:
    """A private directory for Unix sockets: `home/sockets`, or one under the system's temporary directory where that
    path is too long for a socket's address (107 bytes; names of up to 40 fit)."""
    path = home.absolute() / "sockets"
    if len(str(path)) > 66:
        path = Path(tempfile.gettempdir()) / f"millrace-{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise ServiceError(f"{path} belongs to another user: use a shorter [home]")
    return path


def wait_until(is_up: Callable[[], bool], name: str, timeout_s: float, every_s: float = 0.1) -> None:
    """Poll until `is_up`, which may raise to give up at once. Raises ServiceError naming `name` when time is over."""
    deadline = time.monotonic() + timeout_s
    while not is_up():
        if time.monotonic() > deadline:
            raise ServiceError(f"{name} is not ready after {timeout_s:g} s: its log says why; if it is slow, try again")
        time.sleep(every_s)
