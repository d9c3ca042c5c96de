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
        self._kept: deque[StoredEntry] = deque()
        self._size = 0

    def put(self, kept: StoredEntry) -> None:
        """An entry was appended. It is left out while too much waits here already."""
        with self._lock:
            if self._size + kept.size <= self._limit:
                self._kept.append(kept)
                self._size += kept.size

    def take(self, seq: int, most: int) -> list[StoredEntry]:
        """At most so many entries from number `seq` on; none when that one is not here. Forgets what is older."""
        out: list[StoredEntry] = []
        with self._lock:
            kept = self._kept
            while kept and len(out) < most and kept[0].seq <= seq:
                found = kept.popleft()
                self._size -= found.size
                if found.seq == seq:
                    out.append(found)
                    seq += 1
        return out
