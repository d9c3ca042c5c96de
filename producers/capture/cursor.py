"""Reading the capture log forward while it grows.

Invariant: a cursor gives every entry below the log's end once, in order; entries behind a damage in the middle of a
file, and a sound entry that is no record of ours, are skipped and counted, never guessed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from millrace.infra.errors import GatewayError
from millrace.producers.capture.entry import StoredEntry, decode
from millrace.producers.capture.segments import BLOCK, HEAD, SegmentFile, is_sound, segments

logger = logging.getLogger(__name__)


class CaptureCursor:
    """`seq` is the next number to take, `end` tells how far the log goes. One thread may take while another appends."""

    def __init__(self, folder: Path, seq: int, end: Callable[[], int]) -> None:
        self.folder = folder
        self.seq = seq
        self.skipped = 0
        self._end = end
        self._segment: SegmentFile | None = None
        self._file: BinaryIO | None = None
        self._position = 0

    def take(self, limit: int) -> list[StoredEntry]:
        """At most `limit` entries; [] at the end of the log."""
        out: list[StoredEntry] = []
        end = self._end()
        while self.seq < end and len(out) < limit:
            payload = self._next()
            if payload is None:
                self._open_next()
                continue
            try:
                size = HEAD.size + len(payload)
                out.append(StoredEntry(self.seq, decode(payload), size, self._position - size))
            except msgspec.MsgspecError as error:
                logger.error("entry %d of %s is no record of this log: %s", self.seq, self.folder, error)
                self.skipped += 1
            self.seq += 1
        return out

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next(self) -> bytes | None:
        """The entry at the position, or None when no whole, sound one lies there."""
        for _ in range(2 if self._file else 0):
            assert self._file is not None
            head = self._file.read(HEAD.size)
            if len(head) == HEAD.size:
                length, checksum = HEAD.unpack(head)
                payload = self._file.read(length)
                if is_sound(payload, length, checksum):
                    self._position += HEAD.size + length
                    return payload
            # What was read ahead may be of a write that failed, cut off and written over since: going to the end
            # forgets it.
            self._file.seek(0, os.SEEK_END)
            self._file.seek(self._position)
        return None

    def _open_next(self) -> None:
        """Go to the file that holds `seq`, or past a damage to the file behind it."""
        files = segments(self.folder)
        if self._segment is None:
            following = next((s for s in reversed(files) if s.first <= self.seq), files[0] if files else None)
        else:
            following = next((s for s in files if s.first > (self._segment.first if self._segment else -1)), None)
        if following is None:
            raise GatewayError(f"{self.folder} does not hold entry {self.seq}: restart the gateway to cut its log")
        self.close()
        self._segment, self._position = following, 0
        self._file = following.path.open("rb", buffering=BLOCK)
        if following.first > self.seq:
            self.skipped += following.first - self.seq
            self.seq = following.first
        for _ in range(self.seq - following.first):
            self._next()
