"""The law that nothing is dropped in silence: what became of every raw event."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law
from millrace.consumers.audit.turn_outputs import digest
from millrace.infra.log.base import Record
from millrace.infra.log.history.rows import Mark, Row, place_of
from millrace.schemas.records import DeadLetter, Event, Turn


class _Fold(NamedTuple):
    """One range of raw that a turn of refine folded."""

    first: int
    last: int
    skip_count: int
    mark: Mark


class _Raw(NamedTuple):
    """A raw record whose end has not been seen yet. `number` is (epoch, seq) as the runner reads them."""

    mark: Mark
    id: str
    source: bytes
    number: tuple[int, int] | None
    content: int
    """digest of its bytes: what is sent twice is the same twice"""


COUNTS = ("events", "dead letters", "duplicates", "in flight", "before the raw kept", "before the events kept")
BEHIND = 120_000_000
"""micros that a raw record may wait for refine while others go on"""


class Dispositions(Law):
    """Each raw record that refine has folded became an event or a dead letter, or repeats one that did: the same
    source and number, counted as skipped by the turn that met it."""

    name = "dispositions"
    sentence = "every raw event became exactly one event or dead letter, or repeats an earlier one"
    unit = "raw events"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._folds: defaultdict[int, list[_Fold]] = defaultdict(list)
        self._dead: defaultdict[int, dict[int, Mark]] = defaultdict(dict)
        self._counts = dict.fromkeys(COUNTS, 0)
        self._clocks: dict[int, int] = {}
        """micros that refine's slots have reached"""
        self._begin()

    def _begin(self) -> None:
        """Forget the partition that is done."""
        self._open: dict[int, _Raw] = {}
        self._orphans: list[tuple[int, Mark]] = []
        self._ended = array("q")
        self._numbers: defaultdict[tuple[bytes, int], array[int]] = defaultdict(lambda: array("q"))
        self._highest: dict[bytes, tuple[tuple[int, int], Mark]] = {}
        """per source, the highest (epoch, seq) that became an event"""
        self._contents = _Contents()
        self._newest = 0
        """micros of the newest raw record"""
        self._floor = 0
        """offset of raw before which retention has taken the events"""

    def turn(self, row: Row[Turn]) -> None:
        if row["stage"] == "refine":
            self._clocks[row["slot"]] = max(row["now"], self._clocks.get(row["slot"], 0))
            for span in row["ranges"]:
                if span["topic"] == "raw":
                    fold = _Fold(span["first"], span["last"], span["skipped"], row.mark)
                    self._folds[span["partition"]].append(fold)

    def dead_letter(self, row: Row[DeadLetter]) -> None:
        place, mark = place_of(row["place"]), row.mark
        if place.topic == self.facts.topics["raw"]:
            first = self._dead[place.partition].setdefault(place.offset, mark)
            if first is not mark:
                self.fail("a raw event has two dead letters", place, first, mark)

    def unreadable(self, kind: str, record: Record, error: str) -> None:
        """Only a dead letter can be the end of what does not decode."""
        if kind == "raw":
            self._meet(record, "")

    def raw(self, row: Row[Event]) -> None:
        self._meet(row.raw, row["id"])

    def _meet(self, record: Record, event_id: str) -> None:
        self.finding.checked += 1
        mark = Mark(record.place, record.timestamp)
        number, source = _number(record), record.headers.get("source", b"")
        content = digest(b"", {}, record.value)
        self._open[record.offset] = _Raw(mark, event_id, source, number, content)
        self._newest = max(self._newest, record.timestamp)
        if number is not None:
            self._contents.add(digest(source, {}, b"%d/%d" % number), content, record)

    def event(self, row: Row[Event]) -> None:
        if row.name != "Event":
            return
        if row["source_place"] is None:
            self.fail("an event does not say which raw event it came from", row, event=row["id"])
            return
        place = place_of(row["source_place"])
        if (place.topic, place.partition) != (self.facts.topics["raw"], row.place.partition):
            self.fail("an event of a slot names a raw event of another partition", row, place, event=row["id"])
            return
        if not self._ended and not self._orphans and self.facts.starts["events"][row.place.partition]:
            self._floor = place.offset
        raw = self._open.pop(place.offset, None)
        if raw is None:
            if row["source_seq"] is not None:
                self._numbers[row["source"].encode(), row["source_epoch"]].append(row["source_seq"])
            self._orphans.append((place.offset, row.mark))
            return
        self._counts["events"] += 1
        self._end(place.offset, raw)
        if raw.number is not None:
            highest, mark = self._highest.get(raw.source, ((-1, -1), raw.mark))
            if raw.number <= highest:
                message = f"event {raw.number[1]} of a source came after its event {highest[1]}, yet was let through"
                self.fail(message, mark, raw.mark, row, event=row["id"])
            else:
                self._highest[raw.source] = (raw.number, raw.mark)
        if dead := self._dead[place.partition].get(place.offset):
            self.fail("a raw event became an event and a dead letter", raw.mark, row, dead, event=row["id"])

    def _end(self, offset: int, raw: _Raw) -> None:
        """This raw record became something, and used up its number."""
        self._ended.append(offset)
        if raw.number is not None:
            self._numbers[raw.source, raw.number[0]].append(raw.number[1])

    def slot_end(self, partition: int) -> None:
        """What no event named: dead letters first, since they too use up a number; then duplicates; the rest broke."""
        dead = self._dead[partition]
        for offset in [offset for offset in self._open if offset in dead]:
            self._counts["dead letters"] += 1
            self._end(offset, self._open.pop(offset))
        numbers = {source: sorted(seqs) for source, seqs in self._numbers.items()}
        folds = self._folds[partition]
        end = max((fold.last for fold in folds), default=-1)
        if not self.facts.starts["turns.refine"]:
            end = max(self._ended, default=-1)
        duplicates, waiting = [], []
        for offset, raw in self._open.items():
            if offset > end:
                self._counts["in flight"] += 1
                waiting.append(raw)
            elif offset < self._floor:
                self._counts["before the events kept"] += 1
            elif raw.number and _holds(numbers.get((raw.source, raw.number[0]), []), raw.number[1]):
                duplicates.append(offset)
            else:
                self.fail("a raw event was folded but became nothing", raw.mark, event=raw.id)
        self._counts["duplicates"] += len(duplicates)
        self._keeps_up(partition, waiting)
        for mark in self._contents.changes():
            self.fail("a source sent one of its numbers twice, with other content one time", mark)
        self._skips(partition, duplicates)
        self._check_orphans(partition)
        self._begin()

    def _keeps_up(self, partition: int, waiting: list[_Raw]) -> None:
        """The oldest raw record that refine has not folded is not much older than what refine or a source last did."""
        oldest = min(waiting, key=lambda raw: raw.mark.time, default=None)
        if oldest is None:
            return
        now = max(self._clocks.get(partition, 0), self._newest)
        if now - oldest.mark.time > BEHIND:
            seconds = (now - oldest.mark.time) // 1_000_000
            message = f"refine does not keep up: {len(waiting)} raw records wait, the oldest for {seconds} s"
            self.fail(message, oldest.mark, event=oldest.id)

    def _skips(self, partition: int, duplicates: list[int]) -> None:
        """Turns say how many duplicates they skipped: exactly those that are there."""
        duplicates.sort()
        start = self.facts.starts["raw"].get(partition, 0)
        for fold in self._folds[partition]:
            count = bisect_right(duplicates, fold.last) - bisect_left(duplicates, fold.first)
            if fold.first >= max(start, self._floor) and count != fold.skip_count:
                message = f"a turn skipped {fold.skip_count} duplicates of offsets {fold.first} to {fold.last}: {count}"
                self.fail(f"{message} lie there", fold.mark)

    def _check_orphans(self, partition: int) -> None:
        """Events whose raw event had another event already, or is not there."""
        offsets, start = sorted(self._ended), self.facts.starts["raw"].get(partition, 0)
        for offset, mark in self._orphans:
            place = mark.place._replace(topic=self.facts.topics["raw"], offset=offset)
            if offset < start:
                self._counts["before the raw kept"] += 1
            elif _holds(offsets, offset):
                self.fail("a raw event became two events", place, mark)
            else:
                self.fail("an event names a raw event that does not exist", mark, place)

    def finish(self) -> None:
        self.finding.facts |= {name: count for name, count in self._counts.items() if count}


class _Contents:
    """What each source sent under each of its numbers, 32 bytes a record."""

    def __init__(self) -> None:
        self._rows = array("Q")
        self._first: Record | None = None
        self._times = array("q")

    def add(self, number: int, content: int, record: Record) -> None:
        self._rows.extend((number, content, record.offset))
        self._times.append(record.timestamp)
        self._first = self._first or record

    def changes(self) -> Iterator[Mark]:
        """Records whose content differs from what was sent before under the same number."""
        rows = np.array(self._rows, np.uint64).reshape(-1, 3)
        order = np.lexsort((rows[:, 2], rows[:, 0]))
        rows = rows[order]
        differs = (rows[1:, 0] == rows[:-1, 0]) & (rows[1:, 1] != rows[:-1, 1])
        for at in np.flatnonzero(differs) + 1:
            assert self._first is not None
            place = self._first.place._replace(offset=int(rows[at, 2]))
            yield Mark(place, self._times[int(order[at])])


def _number(record: Record) -> tuple[int, int] | None:
    """(epoch, seq) from the headers, None for a record that its source did not number."""
    try:
        return int(record.headers.get("source-epoch", b"0")), int(record.headers["source-seq"])
    except (KeyError, ValueError):
        return None


def _holds(numbers: list[int], number: int) -> bool:
    """Whether a sorted list holds a number."""
    at = bisect_left(numbers, number)
    return at < len(numbers) and numbers[at] == number
