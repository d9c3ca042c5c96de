"""Each process's own store."""

from __future__ import annotations

from datetime import timedelta

import psutil
from torch.distributed import TCPStore

from millrace.trainers.backends.stores import own_store


def test_it_listens_where_it_is_told_and_nowhere_else() -> None:
    store = own_store("127.0.0.1", 1.0)
    listening = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == store.port
    }
    assert listening == {"127.0.0.1"}
    peer = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    peer.set("key", "value")
    assert store.get("key") == b"value"
