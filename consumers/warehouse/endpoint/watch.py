"""Bounds the time of a query where the engine does not: the engine looks at a query's limit, and hears KILL QUERY and
a cancel, between blocks of rows alone. One function over long texts may keep a block for hours.

    limit -> TOLD_S: its client is told -> LET_GO_S: the engine may yet let go -> `must_end`: this process must end

Invariants: only time within the engine counts, never a client that reads slowly; nothing is condemned within its limit,
nor for a query that the engine lets go of in time; queries within their limit are waited for, but not for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from millrace.consumers.warehouse.endpoint.faults import TIMEOUT, QueryError, with_advice

TOLD_S = 1.0
"""past its limit a query's client is told that it has failed"""
LET_GO_S = 10.0
"""past its limit the engine is given up, and as long again while other queries are within theirs"""
LOOK_S = 0.2


class RunningQuery:
    """A query in the engine. limit_s: what it may take; start_s, since: when it began, and when the call of the engine
    began that is under way (None while none is), on a clock of seconds. One call at a time."""

    def __init__(self, limit_s: float, start_s: float = 0.0, since: float | None = None) -> None:
        self.limit_s = limit_s
        self.start_s = start_s
        self.since = since

    def over_s(self, now: float) -> float:
        """For how long the engine has had to end it: 0 or less while it is within its limit. Of a call that begins
        after the limit, since that call began."""
        return 0.0 if self.since is None else now - max(self.start_s + self.limit_s, self.since)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A call of the engine."""
        self.since = time.monotonic()
        try:
            yield
        finally:
            self.since = None

    def check(self) -> None:
        """Raises QueryError where its client is to be told that its time is over."""
        if self.over_s(time.monotonic()) > TOLD_S:
            message = f"Timeout exceeded: the query has had its {self.limit_s:g} s, and the engine has not ended it."
            raise QueryError(with_advice(message, TIMEOUT), TIMEOUT)


def must_end(runs: Collection[RunningQuery], now: float) -> bool:
    """Whether the engine keeps a query for so long past its limit that only the end of its process ends it. Pure."""
    over = [run.over_s(now) for run in runs]
    worst = max(over, default=0.0)
    is_busy = any(run.since is not None and delay <= 0 for run, delay in zip(runs, over, strict=True))
    return worst > (2 * LET_GO_S if is_busy else LET_GO_S)


class QueryWatch:
    """Looks after the queries of one engine. overdue: called once, in a thread of its own, when they are condemned; it
    ends this process. None: nobody does."""

    def __init__(self, overdue: Callable[[], None] | None = None) -> None:
        self._runs: set[RunningQuery] = set()
        self._any = threading.Condition()
        if overdue is not None:
            threading.Thread(target=self._look, args=(overdue,), name="watch", daemon=True).start()

    def begin(self, run: RunningQuery) -> None:
        """A query begins."""
        run.start_s = time.monotonic()
        with self._any:
            self._runs.add(run)
            self._any.notify()

    def end(self, run: RunningQuery) -> None:
        """The engine has let go of it. Idempotent."""
        with self._any:
            self._runs.discard(run)

    def _look(self, overdue: Callable[[], None]) -> None:
        while True:
            with self._any:
                while not self._runs:
                    self._any.wait()
                runs = set(self._runs)
            if must_end(runs, time.monotonic()):
                overdue()
                return
            time.sleep(LOOK_S)
