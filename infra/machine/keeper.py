"""The supervisor's own process: supervisord, which adopts orphans, outlives a full disk and counts unplanned ends.

Run as `python -m millrace.infra.machine.keeper` with supervisord's arguments. Invariants: a process whose parent died
belongs to the supervisor, whatever session or title it gave itself, so that it can be found and ended; a log that
cannot be written costs lines, never the supervisor; an end that nobody asked for is remembered until the program is
changed.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any

MOST_ENDS = 20
"""newest unplanned ends of a program that are kept"""
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)"""
NAME = "millrace"
"""of the calls that are added to supervisord's own"""


class Ends:
    """What `millrace.ends` answers: of each program, when it ended unasked and whether it had started by then."""

    def __init__(self, events: Any) -> None:
        self._ends: dict[str, deque[tuple[float, bool]]] = {}
        events.subscribe(events.ProcessStateExitedEvent, self._on_exit)
        events.subscribe(events.ProcessStateBackoffEvent, self._on_failure)
        events.subscribe(events.ProcessGroupRemovedEvent, self._on_removal)

    def ends(self) -> dict[str, list[list[float | bool]]]:
        """The newest unplanned ends by program, oldest first: [seconds since the epoch, whether it had started]."""
        return {name: [[at, has_started] for at, has_started in entries] for name, entries in self._ends.items()}

    def _on_exit(self, event: Any) -> None:
        if not event.expected:
            self._note(event.process.config.name, has_started=True)

    def _on_failure(self, event: Any) -> None:
        self._note(event.process.config.name, has_started=False)

    def _note(self, name: str, *, has_started: bool) -> None:
        self._ends.setdefault(name, deque(maxlen=MOST_ENDS)).append((time.time(), has_started))

    def _on_removal(self, event: Any) -> None:
        self._ends.pop(event.group, None)


def make_ends(supervisord: object, **options: object) -> Ends:
    """The factory that supervisord's configuration names."""
    return Ends(importlib.import_module("supervisor.events"))


def adopt() -> None:
    """Have the kernel hand every orphan below this process to it instead of to the machine's first process."""
    ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0)


def outlive_full_disks(loggers: Any) -> None:
    """A log that cannot be written loses lines until it can be written again."""
    for kind in (loggers.FileHandler, loggers.RotatingFileHandler, loggers.StreamHandler):
        kind.emit = _patient(kind.emit)
        kind.handleError = _print_nothing


def _patient(emit: Callable[..., None]) -> Callable[..., None]:
    def patient(handler: Any, record: object) -> None:
        try:
            if getattr(handler.stream, "closed", False):  # a change of files failed half way
                handler.reopen()
            emit(handler, record)
        except (OSError, ValueError):
            return

    return patient


def _print_nothing(handler: object) -> None:
    """supervisord would print a trace to its own log, which lies on the same disk."""


def main() -> None:
    """Run supervisord with this process's arguments."""
    adopt()
    outlive_full_disks(importlib.import_module("supervisor.loggers"))
    importlib.import_module("supervisor.supervisord").main()


if __name__ == "__main__":
    main()
