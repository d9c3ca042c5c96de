"""What this process reports to gateways in the background: for each gateway a spool on disk and a thread.

Invariants: `take` and `flush` never raise, whatever disk and gateway do; what is reported is on disk when `take`
returns, and is sent until the gateway answers, by a later process where this one ends; what is lost is counted, and
said once a gateway. A child that was forked begins with nothing, and a worker of `multiprocessing` sends what waits
before it ends, as any process does."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.util import Finalize, register_after_fork
from pathlib import Path

from millrace.producers.intake.capture import Capture
from millrace.producers.intake.conversation import Owner
from millrace.producers.intake.spool import Spool, home
from millrace.schemas.json_values import JsonObject

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""how long the end of a session, and that of the process, wait for what was reported"""
LOOK_S = 0.005


class GatewayLine:
    """What goes to one gateway."""

    def __init__(self, base_url: str, root: Path) -> None:
        self._url = base_url
        self._spool: Spool | None = None
        self._capture: Capture | None = None
        self._unkept = 0
        self._said = False
        try:
            self._spool = Spool(root)
            self._capture = Capture(self._spool, self._tell)
        except Exception as error:  # an agent goes on without a spool, whatever is wrong with the disk
            self._tell(f"tool calls are not reported: no spool in {root} ({error})")

    @property
    def lost(self) -> int:
        """Events that never reach the gateway."""
        if self._capture is None or self._spool is None:
            return self._unkept
        return self._unkept + self._spool.lost + self._capture.refused + self._capture.unread

    def take(self, owner: Owner, event: JsonObject) -> None:
        """Keep an event. Never raises."""
        if self._capture is None:
            self._unkept += 1
        else:
            self._capture.take(owner, lambda: [event])

    def miss(self, why: str) -> None:
        """An event is lost before it was one."""
        self._unkept += 1
        self._tell(why)

    def flush(self, patience_s: float) -> bool:
        """Wait until the gateway answered for what waits; whether it did in time."""
        if self._spool is None:
            return True
        log, deadline = self._spool.log, time.monotonic() + patience_s
        end = log.end
        while log.acked < end:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_S)
        return True

    def close(self, patience_s: float) -> None:
        """Send what waits, for so long at most."""
        if self._capture is not None:
            self._capture.close(patience_s)

    def _tell(self, text: str) -> None:
        logger.log(logging.DEBUG if self._said else logging.WARNING, "%s: %s", self._url, text)
        self._said = True


class Reports:
    """Those of a process. `root` says where spools lie."""

    def __init__(self, root: Callable[[], Path] = home) -> None:
        self._root = root
        self._begin()

    def _begin(self) -> None:
        self._turn = threading.Lock()
        self._lines: dict[str, GatewayLine] = {}

    def take(self, owner: Owner, event: JsonObject) -> None:
        """Report an event of the session of `owner`. Never raises."""
        self._line(owner.base_url).take(owner, event)

    def miss(self, owner: Owner, why: str) -> None:
        """An event of the session of `owner` is lost before it was one. Never raises."""
        self._line(owner.base_url).miss(why)

    def _line(self, base_url: str) -> GatewayLine:
        line = self._lines.get(base_url)
        if line is None:
            with self._turn:
                line = self._lines.get(base_url)
                if line is None:
                    line = self._lines[base_url] = GatewayLine(base_url, self._root())
        return line

    def flush(self, base_url: str, patience_s: float = PATIENCE_S) -> bool:
        """Wait until a gateway answered for everything; whether it did in time."""
        line = self._lines.get(base_url)
        return line is None or line.flush(patience_s)

    def lost(self, base_url: str) -> int:
        """Events that never reach this gateway."""
        line = self._lines.get(base_url)
        return 0 if line is None else line.lost

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Send what waits, for so long at most at each gateway. What is reported later begins anew."""
        with self._turn:
            lines, self._lines = self._lines, {}
        for line in lines.values():
            line.close(patience_s)

    def after_fork(self) -> None:
        """This process is a child: the files and threads of its parent stay the parent's."""
        _PARENTS.append(self._lines)
        self._begin()


_PARENTS: list[dict[str, GatewayLine]] = []
"""kept, so that nothing of them is closed here"""
REPORTS = Reports()
atexit.register(REPORTS.close)
os.register_at_fork(after_in_child=lambda: REPORTS.after_fork())


def _worker(reports: Reports) -> None:
    """This process is a worker of `multiprocessing`, which ends without atexit."""
    Finalize(None, reports.close, exitpriority=10)


# A worker forgets what was registered before it began; one may also read this module while it runs.
register_after_fork(REPORTS, _worker)
if multiprocessing.parent_process() is not None:
    _worker(REPORTS)
