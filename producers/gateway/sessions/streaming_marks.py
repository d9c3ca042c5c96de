"""Streamed replies that are under way, in a small file beside the capture log: what a process that is killed cannot
record any more, the next one labels.

    mark in the file -> first token to the client -> record in the log, whose header names the mark

Invariants: a client gets no token of a stream that is not marked, as far as the disk takes marks; a mark is settled by
the one write that records its call, so that a call is recorded or found here, and never both; the file names what is
under way now and a bounded rest of what is settled. A mark is in the kernel when `begin` returns: it outlives the
process, and not a power cut, like the log itself."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from millrace.infra import durable

logger = logging.getLogger(__name__)

REPLY = "_reply"
"""header of the entry that settles a mark: it stays in the capture log"""
MOST_BYTES = 1 << 20
"""size from which on the file is written anew with what is still under way"""


class StreamingMarks:
    """The marks in `folder`. `left`: trajectories by the names of replies that an earlier process left here; fold the
    capture log before you believe them."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.left: dict[str, str] = {}
        self._path = folder / "underway"
        self._most_bytes = most_bytes
        self._now: dict[str, str] = {}
        self._file = -1
        self._size = 0
        if self._path.exists():
            # A line without its end was never whole, so no token followed it.
            for line in self._path.read_bytes().split(b"\n")[:-1]:
                name, _, trajectory = line.decode(errors="replace").partition(" ")
                self.left[name] = trajectory

    def fold(self, headers: Mapping[str, str]) -> None:
        """An entry of the capture log: what it settles is not left."""
        if REPLY in headers:
            self.left.pop(headers[REPLY], None)

    def begin(self, name: str, trajectory: str) -> None:
        """The first token of this reply is about to be told. Never raises: the reply goes out all the same."""
        self._now[name] = trajectory
        line = _line(name, trajectory)
        try:
            if self._file < 0 or self._size + len(line) > self._most_bytes:
                self._rewrite()
                return
            self._size += os.write(self._file, line)
        except OSError as error:
            logger.warning("a reply of %s is not marked as under way: %s", trajectory, error)
            self._size = self._most_bytes  # whatever was written in part goes with the next mark

    def note(self, name: str) -> dict[str, str]:
        """The header of the entry that records this reply; none for one that is not marked."""
        return {REPLY: name} if name in self._now else {}

    def settle(self, name: str) -> None:
        """The reply is recorded, or its loss is."""
        self._now.pop(name, None)
        self.left.pop(name, None)

    def compact(self) -> None:
        """Name only what is under way in the file. Raises OSError; then the file names some that are recorded too."""
        if self._path.exists():
            self._rewrite()

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _rewrite(self) -> None:
        self.close()
        data = b"".join(_line(*mark) for mark in (*self.left.items(), *self._now.items()))
        durable.write(self._path, data, sync=False)
        self._file, self._size = os.open(self._path, os.O_WRONLY | os.O_APPEND), len(data)
        # What is under way alone may be more than that: then it is written anew each time it has doubled.
        self._most_bytes = max(self._most_bytes, 2 * len(data))


def _line(name: str, trajectory: str) -> bytes:
    return f"{name} {trajectory}\n".encode()
