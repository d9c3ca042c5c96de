"""What was captured and waits for the gateway: a capture log of one process, in a folder of its own.

Invariants: an event is handed to the kernel when `put` returns, so it survives kill -9; events have the numbers of the
log, so that the gateway takes each once however often it is sent; at most `max_bytes` wait, and what does not fit is
counted; what an ended process left is sent by the next one that shares the folder, as long as it is younger than
`KEPT_S`."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import orjson

from millrace.infra.errors import GatewayError
from millrace.producers.capture.entry import Entry
from millrace.producers.capture.log import RESERVE_STEP, CaptureLog, LogFull
from millrace.producers.capture.recent import Recent
from millrace.producers.capture.segments import segments
from millrace.schemas import bounds
from millrace.schemas.ids import new_id
from millrace.schemas.json_values import JsonObject

MAX_BYTES = 256 << 20
KEPT_S = 86_400.0
"""seconds for which what an ended process left is kept to be sent: as long as raw content is by default, since this
machine may have none of the deployment's settings. Its episodes are over by then"""
ROOM = 4096
"""bytes of a report beside its events"""
LARGEST = bounds.REPORT_BYTES - ROOM
"""bytes of an event that one report takes"""
ENDS = "ends"
"""header of an entry that is the end of its session"""


def home() -> Path:
    """Where spools lie unless said otherwise."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "millrace" / "intake"


class Spool:
    """That of this process, in a new folder under `root`. Raises OSError and GatewayError where it cannot be made."""

    def __init__(self, root: Path, *, max_bytes: int = MAX_BYTES) -> None:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.root = root
        self.log = _make_log(root, max_bytes)
        self.lost = 0
        """events that did not fit, or could not be written"""

    def put(self, event: JsonObject, key: str, base_url: str) -> bool:
        """Keep an event for the session behind `key`, or of `kind` "end" its end; whether it was kept."""
        headers = {"source": self.log.source, "url": base_url}
        if event["kind"] == "end":
            headers[ENDS] = ""
        try:
            self.log.append(Entry(key, headers, encode(event)))
        except LogFull:
            self.lost += 1
            return False
        return True

    def left_behind(self) -> Iterator[CaptureLog]:
        """The logs of processes that ended. Close each, or `remove` it."""
        for folder in sorted(self.root.iterdir()):
            if folder == self.log.folder or not folder.is_dir():
                continue
            with suppress(GatewayError, OSError):  # its process lives, or another looks after it
                yield open_log(folder)

    def close(self) -> None:
        """Let go of the folder, which goes where nothing waits in it."""
        if self.log.acked >= self.log.end:
            remove(self.log)
        else:
            self.log.close()


def open_log(folder: Path, *, max_bytes: int = MAX_BYTES) -> CaptureLog:
    """The log in a folder."""
    log = CaptureLog(folder, name="intake", reserve_bytes=RESERVE_STEP, max_waiting=max_bytes)
    log.recent = Recent(0)  # read back from the files: nobody waits for it
    return log


def _make_log(root: Path, max_bytes: int) -> CaptureLog:
    while True:
        try:
            return open_log(root / new_id(), max_bytes=max_bytes)
        except (GatewayError, FileNotFoundError):  # taken for one that was left behind before it was locked
            if not root.is_dir():
                raise


def remove(log: CaptureLog) -> None:
    """Delete a log whose events are sent or given up. Its lock goes last, so that nobody opens what is left of it."""
    for path in sorted(log.folder.iterdir()):
        if path.name != "lock":
            path.unlink(missing_ok=True)
    shutil.rmtree(log.folder, ignore_errors=True)
    log.close()


def is_outdated(log: CaptureLog) -> bool:
    """Whether a log that a process left is too old to be sent."""
    newest = max((segment.path.stat().st_mtime for segment in segments(log.folder)), default=0.0)
    return newest < time.time() - KEPT_S


def encode(event: JsonObject) -> bytes:
    """An event as JSON, without the kind where that is an end. Content that no report takes is left out, and its size
    and digest say so in its place."""
    if event["kind"] == "end":
        return orjson.dumps({name: value for name, value in event.items() if name != "kind"})
    field = "arguments" if event["kind"] == "tool_call" else "content"
    content = str(event[field])
    if len(content) <= LARGEST and len(data := orjson.dumps(event)) <= LARGEST:
        return data
    raw = content.encode(errors="replace")
    left_out = {"left_out": {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}}
    return orjson.dumps({**event, field: orjson.dumps(left_out).decode()})
