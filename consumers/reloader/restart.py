"""End an engine of this machine that can no longer be trusted; whoever supervises it starts it again."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

import psutil

PATIENCE_S = 10.0


def end_engine(url: str) -> int | None:
    """Ask the process that listens at `url` to end, then insist. Its pid, or None when nothing on this machine that
    belongs to us listens there. Blocks for up to 10 s."""
    process = _listener(url)
    if process is None:
        return None
    process.terminate()
    try:
        process.wait(PATIENCE_S)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait(PATIENCE_S)
    return process.pid


def _listener(url: str) -> psutil.Process | None:
    parts = urlsplit(url)
    if not _is_here(parts.hostname or ""):
        return None
    for process in psutil.process_iter():
        try:
            sockets = process.net_connections("tcp")
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        if any(one.status == psutil.CONN_LISTEN and one.laddr.port == parts.port for one in sockets):
            return process
    return None


def _is_here(host: str) -> bool:
    try:
        address = ipaddress.ip_address(socket.gethostbyname(host))
    except (OSError, ValueError):
        return False
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    return address.is_loopback or str(address) in own
