"""Ranges that neither a topic nor the archive has, in the one way in which every reader names them."""

from __future__ import annotations

from millrace.infra.errors import HistoryGone
from millrace.infra.log.history.reader import History


def gap_line(topic: str, partition: int, first: int, last: int, rest: str) -> str:
    """What is missing and what is left."""
    return f"{topic}[{partition}]: offsets {first} to {last} are neither in the topic nor in the archive; {rest}"


def begins_at(start: int) -> str:
    """What is left of a partition that has lost its beginning."""
    return f"what is left begins at {start}"


def missing_parts(history: History, *kinds: str) -> list[str]:
    """The beginnings of these kinds of topic that nobody has any more, each in words."""
    return [
        gap_line(history.names[kind], partition, 0, start - 1, begins_at(start))
        for kind in kinds
        for partition, start in sorted(history.starts(kind).items())
        if start
    ]


def check_whole(history: History, *kinds: str, accepts_gaps: bool) -> list[str]:
    """`missing_parts`, for whoever means all of it: raises HistoryGone where anything is, unless `accepts_gaps`."""
    losses = missing_parts(history, *kinds)
    if losses and not accepts_gaps:
        raise HistoryGone(f"{'; '.join(losses)}. --what-is-left goes on with that")
    return losses
