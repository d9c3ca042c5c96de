"""Ranges that neither a topic nor the archive has, in the one way in which every reader names them."""

from __future__ import annotations

from millrace.infra.errors import HistoryGone
from millrace.infra.log.history.reader import History


def nowhere(topic: str, partition: int, first: int, last: int, left: str) -> str:
    """What is missing and what is left."""
    return f"{topic}[{partition}]: offsets {first} to {last} are neither in the topic nor in the archive; {left}"


def begins_at(start: int) -> str:
    """What is left of a partition that has lost its beginning."""
    return f"what is left begins at {start}"


def lost(history: History, *kinds: str) -> list[str]:
    """The beginnings of these kinds of topic that nobody has any more, each in words."""
    return [
        nowhere(history.names[kind], partition, 0, start - 1, begins_at(start))
        for kind in kinds
        for partition, start in sorted(history.starts(kind).items())
        if start
    ]


def whole(history: History, *kinds: str, what_is_left: bool) -> list[str]:
    """`lost`, for whoever means all of it: raises HistoryGone where anything is, unless `what_is_left`."""
    gone = lost(history, *kinds)
    if gone and not what_is_left:
        raise HistoryGone(f"{'; '.join(gone)}. --what-is-left goes on with that")
    return gone
