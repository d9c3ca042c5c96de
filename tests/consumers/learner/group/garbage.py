"""What may reach a port that others can connect to: bytes of another protocol, connections that fall silent, lengths
without an end."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

HELLO = b"\x00" + struct.pack("<I", 0x3C85F7CE)
"""how every client of torch's store begins"""
SET, CHECK = b"\x01", b"\x04"
ENDLESS = struct.pack("<Q", 1 << 62)
KINDS = {
    "another protocol": b"GET / HTTP/1.1\r\nhost: store\r\n\r\n",
    "noise": random.Random(0).randbytes(4096),
    "nothing": b"",
    "half a hello": HELLO[:3],
    "half a request": HELLO + SET + struct.pack("<Q", 4) + b"he",
    "a key without an end": HELLO + SET + ENDLESS + b"he",
    "a value without an end": HELLO + SET + struct.pack("<Q", 1) + b"k" + ENDLESS + b"he",
    "a list without an end": HELLO + CHECK + ENDLESS + b"he",
}
ROUND_S = 0.05
MOST = 200
"""connections that are left open"""


class Garbage:
    """Sends one of each of `KINDS` to every port that `ports` names, again and again while the block lasts. Connections
    stay open. The block begins once every port has had all."""

    def __init__(self, ports: Callable[[], list[int]]) -> None:
        self._ports = ports
        self._open: deque[socket.socket] = deque()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="garbage", daemon=True)

    def __enter__(self) -> Self:
        self._round()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        for one in self._open:
            one.close()

    def _run(self) -> None:
        while not self._over.wait(ROUND_S):
            self._round()

    def _round(self) -> None:
        for port in self._ports():
            for content in KINDS.values():
                with suppress(OSError):  # its process has died, or hung up
                    self._open.append(connection := socket.create_connection(("127.0.0.1", port), 5))
                    connection.sendall(content)
        while len(self._open) > MOST:
            self._open.popleft().close()
