"""The newest entries of the capture log, handed to the forwarder so that it need not read them back from the disk.

Invariants: at most `limit` bytes are held; what did not fit is left out, and whoever takes finds that number missing
and reads it from the files; entries are given once, in order, without gaps within one taking."""

from __future__ import annotations

import threading
from collections import deque

from millrace.producers.capture.entry import StoredEntry

LIMIT = 16 << 20


class Recent:
    """One thread puts, another takes."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._items: deque[StoredEntry] = deque()
        self._size = 0

    def put(self, item: StoredEntry) -> None:
        """An entry was appended. It is left out while too much waits here already."""
        with self._lock:
            if self._size + item.size <= self._limit:
                self._items.append(item)
                self._size += item.size

    def take(self, seq: int, most: int) -> list[StoredEntry]:
        """At most so many entries from number `seq` on; none when that one is not here. Forgets what is older."""
        out: list[StoredEntry] = []
        with self._lock:
            items = self._items
            while items and len(out) < most and items[0].seq <= seq:
                item = items.popleft()
                self._size -= item.size
                if item.seq == seq:
                    out.append(item)
                    seq += 1
        return out
