"""Rows of what is written from now on: of one partition by reading what is new, of several kinds by waiting for it.

Invariants: every record is given once, in the order of its partition; a topic that does not exist is a TopicError,
since nobody could tell its silence from rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Self

from millrace.infra.log.base import EARLIEST, Record
from millrace.infra.log.history.kinds import Kind, R
from millrace.infra.log.history.reader import History, Unreadable, name_in_log
from millrace.infra.log.history.rows import Row


class PartitionCursor(Generic[R]):
    """What is new in one partition each time it is asked."""

    def __init__(
        self, history: History, kind: Kind[R], partition: int = 0, start: int = 0, unreadable: Unreadable = name_in_log
    ) -> None:
        self._history = history
        self._kind = kind
        self._partition = partition
        self._unreadable = unreadable
        self.next = start
        """behind the last record that was taken"""

    def rows_on(self, end: int | None = None) -> Iterator[Row[R]]:
        """Rows from where the last call stopped to the stable end, or to `end`. A record whose taker raises is given
        again."""
        bus, topic = self._history.bus, self._history.names[self._kind]
        stop = bus.ends(topic)[self._partition] if end is None else end
        if stop <= self.next:
            return
        for record in bus.read(topic, self._partition, self.next, stop):
            row = self._history.row(self._kind, record, self._unreadable)
            if row is not None:
                yield row
            self.next = record.offset + 1
        self.next = stop


class Follower:
    """Follows every partition of several kinds, from what is kept."""

    def __init__(self, history: History, kinds: Sequence[str], unreadable: Unreadable = name_in_log) -> None:
        self._history = history
        self._unreadable = unreadable
        self._kinds = {history.names[kind]: kind for kind in kinds}
        everywhere = [(topic, p) for topic in self._kinds for p in range(history.bus.partitions(topic))]
        self._tail = history.bus.tail(dict.fromkeys(everywhere, EARLIEST))

    def poll(self, timeout_s: float, most: int = 2000) -> list[Row[Any]]:
        """What came within `timeout_s`, at most so many records."""
        return [row for record in self._tail.poll(most, timeout_s) if (row := self._row(record)) is not None]

    def catch_up(self) -> Iterator[Row[Any]]:
        """All that was written before this call, however fast more comes."""
        for (topic, partition), start in self._tail.positions().items():
            end = start
            for record in self._history.bus.read(topic, partition, start):
                if (row := self._row(record)) is not None:
                    yield row
                end = record.offset + 1
            self._tail.seek(topic, partition, end)

    def close(self) -> None:
        """Stop following."""
        self._tail.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _row(self, record: Record) -> Row[Any] | None:
        return self._history.row(self._kinds[record.topic], record, self._unreadable)
