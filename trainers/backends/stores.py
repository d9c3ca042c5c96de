"""Where the ranks of a group meet: a key-value store that one process holds."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore


def own_store(host: str, timeout_s: float) -> TCPStore:
    """A store in this process, on a free port of `host` and no other address (torch alone would bind to all). Waiting
    for a key ends after `timeout_s`."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
