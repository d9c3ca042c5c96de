"""When a complete group may be given the next seq: one pure function a policy.

Each answers `ready`, `hold` or `stale`. What is held is asked again, earliest deadline first, whenever something is
resolved; only `reserve` ever holds, and it never says stale."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from millrace.streams.dispatch.schedule import BatchSchedule
from millrace.streams.dispatch.state import Book

Answer = Literal["ready", "hold", "stale"]


class ReleaseCandidate(NamedTuple):
    """What a policy needs to know of a complete group."""

    deadline: int
    """last batch that may contain it"""
    eta: int
    """bound it was granted under"""
    v_head: int
    v_tail: int


def binding(book: Book, deadline: int) -> Iterable[int]:
    """The batches k < deadline whose end must not be passed over: those with n_k >= 1.

    Without that condition a batch that is long over, which nobody waits for, would hold every group forever."""
    return (k for k in book.deadlines() if k < deadline)


def reserve(group: ReleaseCandidate, book: Book, schedule: BatchSchedule) -> Answer:
    """Room is kept for every unresolved ticket with an earlier deadline: exact bound, nothing dropped."""
    fits = all(book.seq + 1 + book.urgent(k) <= schedule.end(k) for k in binding(book, group.deadline))
    return "ready" if fits else "hold"


def soft(group: ReleaseCandidate, book: Book, schedule: BatchSchedule) -> Answer:
    """At once. The bound is exact for eta = 0 only; stragglers are overtaken."""
    return "ready"


def reject(group: ReleaseCandidate, book: Book, schedule: BatchSchedule) -> Answer:
    """At once, unless its oldest token would be too old: hard, but it selects against long answers."""
    return "ready" if schedule.batch_of(book.seq) - group.v_head <= group.eta else "stale"


def mask_head(group: ReleaseCandidate, book: Book, schedule: BatchSchedule) -> Answer:
    """At once, unless even its newest token would be too old; the learner masks the older ones."""
    return "ready" if schedule.batch_of(book.seq) - group.v_tail <= group.eta else "stale"


POLICIES: dict[str, Callable[[ReleaseCandidate, Book, BatchSchedule], Answer]] = {
    "reserve": reserve,
    "soft": soft,
    "reject": reject,
    "mask-head": mask_head,
}
