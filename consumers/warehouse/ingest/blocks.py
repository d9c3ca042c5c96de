"""Where a partition is cut into blocks: one block is one insert, one insert one part. Pure.

Invariants: blocks follow one another without a hole or an overlap; no block crosses a multiple of SPAN offsets, a month
of the time of writing, or SIZE bytes by more than its last record; where a block ends depends on the log and on where
it began, so a process that starts again at the end of a block makes the blocks that it would have made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from millrace.consumers.warehouse.ingest.avro_file import millis
from millrace.infra.log.base import Record

SPAN = 16_384
"""offsets that a block lies within"""
SIZE = 16 << 20
"""bytes of keys and values after which a block ends"""


@dataclass(slots=True)
class Block:
    """Consecutive records of one partition, written in one month. `until`: the first offset behind it."""

    topic: str
    part: int
    records: list[Record] = field(default_factory=list)
    size: int = 0

    @property
    def first(self) -> int:
        return self.records[0].offset

    @property
    def until(self) -> int:
        return self.records[-1].offset + 1


class Cutter:
    """Cuts one partition. `add` gives the block that a record ends or begins anew; `rest` what is open."""

    def __init__(self, topic: str, part: int) -> None:
        self._open = Block(topic, part)
        self._month = range(0)

    @property
    def size(self) -> int:
        """Bytes of what is open."""
        return self._open.size

    def add(self, record: Record) -> Iterator[Block]:
        """Take the next record; gives the blocks that are whole now."""
        moment = millis(record.timestamp)
        if self._open.records and (self._open.first // SPAN != record.offset // SPAN or moment not in self._month):
            yield self._take()
        if not self._open.records:
            self._month = month_of(moment)
        self._open.records.append(record)
        self._open.size += len(record.value or b"") + len(record.key)
        if self._open.size >= SIZE or record.offset % SPAN == SPAN - 1:
            yield self._take()

    def rest(self) -> Block | None:
        """What is open, which is closed now; None where nothing is."""
        return self._take() if self._open.records else None

    def _take(self) -> Block:
        block, self._open = self._open, Block(self._open.topic, self._open.part)
        return block


def month_of(moment: int) -> range:
    """The millis of the month (UTC) that a moment in millis lies in."""
    day = datetime.fromtimestamp(moment / 1000, UTC)
    first = datetime(day.year, day.month, 1, tzinfo=UTC)
    after = datetime(day.year + day.month // 12, day.month % 12 + 1, 1, tzinfo=UTC)
    return range(round(first.timestamp() * 1000), round(after.timestamp() * 1000))
