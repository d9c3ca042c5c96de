"""The newest records of a partition, for whoever wants only the last of them.

Invariant: what is read grows with the distance of what is wanted from the end, not with the topic."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from millrace.infra.log.base import Bus, Record

WINDOW = 64
"""offsets looked at first; doubled with every step back"""
WIDEST = 4096
"""offsets looked at in one step at most: so many records are in memory"""


def newest_first(bus: Bus, topic: str, partition: int = 0) -> Iterator[Record]:
    """Committed records of a partition, from the last to the first."""
    start, end = bus.starts(topic)[partition], bus.ends(topic)[partition]
    window = WINDOW
    while start < end:
        low = max(start, end - window)
        yield from reversed(list(bus.read(topic, partition, low, end)))
        end, window = low, min(window * 2, WIDEST)


def last(bus: Bus, topic: str, matches: Callable[[Record], bool] = lambda _: True) -> Record | None:
    """The last committed record of a one-partition topic that is wanted, None when it holds none."""
    return next(filter(matches, newest_first(bus, topic)), None)
