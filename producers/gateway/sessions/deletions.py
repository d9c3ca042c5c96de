"""Responses that their callers deleted: their ids, in a small file beside the capture log, which would give them back.

    id in the file, on the disk -> gone for the gateway -> answer to the client

Invariants: what a client was told to be deleted stays so over every restart, however the process ended; an id that was
written in part is no response's; the file holds no id that the log, when the gateway started, did not have. The record
of a call is history, and stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from millrace.infra import durable, faults


class DeletedResponses:
    """Those of the log in `folder`. `left`: the ids that were deleted before this start."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "deleted"
        self.left: set[str] = set()
        if self._path.exists():
            self.left = {line.decode(errors="replace") for line in self._path.read_bytes().split(b"\n") if line}

    def add(self, id: str) -> None:
        """A response goes. Raises OSError where the disk does not take that: then nobody may count on it."""
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, durable.PRIVATE_MODE)
        try:
            # On a line of its own, whatever a process that was killed left before it.
            line = b"\n%s\n" % id.encode()
            if os.write(file, line) != len(line):
                raise OSError(f"{self._path} takes no more")
            os.fsync(file)
        finally:
            os.close(file)
        faults.point("gateway.deleted")

    def settle(self, forget: Callable[[str], bool]) -> None:
        """A start has read the log: what was deleted is forgotten, and an id that it did not give back goes too."""
        logged_ids = {id for id in self.left if forget(id)}
        if logged_ids != self.left:
            durable.write(self._path, b"".join(b"%s\n" % id.encode() for id in sorted(logged_ids)))
            self.left = logged_ids
