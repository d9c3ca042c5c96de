"""The claim that nothing is dropped in silence: what became of every raw event."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from typing import NamedTuple

from consumers.audit.claim import Claim
from consumers.audit.facts import Facts
from consumers.audit.rows import Mark, Row, place_of
from infra.bus.base import Record


class _Fold(NamedTuple):
    """One range of raw that a turn of refine folded."""

    first: int
    last: int
    skipped: int
    mark: Mark


class _Raw(NamedTuple):
    """A raw record whose end has not been seen yet. `number` is (epoch, seq) as the runner reads them."""

    mark: Mark
    id: str
    source: bytes
    number: tuple[int, int] | None


COUNTS = ("events", "dead letters", "duplicates", "in flight", "before the raw kept", "before the events kept")


class Dispositions(Claim):
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
        self._begin()

    def _begin(self) -> None:
        """Forget the partition that is done."""
        self._open: dict[int, _Raw] = {}
        self._orphans: list[tuple[int, Mark]] = []
        self._ended = array("q")
        self._numbers: defaultdict[tuple[bytes, int], array[int]] = defaultdict(lambda: array("q"))
        self._highest: dict[bytes, tuple[tuple[int, int], Mark]] = {}
        """per source, the highest (epoch, seq) that became an event"""
        self._floor = 0
        """offset of raw before which retention has taken the events"""

    def turn(self, row: Row) -> None:
        if row["stage"] == "refine":
            for span in row["ranges"]:
                if span["topic"] == "raw":
                    fold = _Fold(span["first"], span["last"], span["skipped"], row.mark)
                    self._folds[span["partition"]].append(fold)

    def dead_letter(self, row: Row) -> None:
        place, mark = place_of(row["place"]), row.mark
        if place.topic == self.facts.topics["raw"]:
            first = self._dead[place.partition].setdefault(place.offset, mark)
            if first is not mark:
                self.fail("a raw event has two dead letters", place, first, mark)

    def unreadable(self, kind: str, record: Record, error: str) -> None:
        """Only a dead letter can be the end of what does not decode."""
        if kind == "raw":
            self._meet(record, "")

    def raw(self, row: Row) -> None:
        self._meet(row.raw, row["id"])

    def _meet(self, record: Record, event_id: str) -> None:
        self.finding.checked += 1
        mark = Mark(record.place, record.timestamp)
        self._open[record.offset] = _Raw(mark, event_id, record.headers.get("source", b""), _number(record))

    def event(self, row: Row) -> None:
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
        done = max((fold.last for fold in folds), default=-1)
        if not self.facts.starts["turns.refine"]:
            done = max(self._ended, default=-1)
        duplicates = []
        for offset, raw in self._open.items():
            if offset > done:
                self._counts["in flight"] += 1
            elif offset < self._floor:
                self._counts["before the events kept"] += 1
            elif raw.number and _holds(numbers.get((raw.source, raw.number[0]), []), raw.number[1]):
                duplicates.append(offset)
            else:
                self.fail("a raw event was folded but became nothing", raw.mark, event=raw.id)
        self._counts["duplicates"] += len(duplicates)
        self._skips(partition, duplicates)
        self._unmatched(partition)
        self._begin()

    def _skips(self, partition: int, duplicates: list[int]) -> None:
        """Turns say how many duplicates they skipped: exactly those that are there."""
        duplicates.sort()
        start = self.facts.starts["raw"].get(partition, 0)
        for fold in self._folds[partition]:
            found = bisect_right(duplicates, fold.last) - bisect_left(duplicates, fold.first)
            if fold.first >= max(start, self._floor) and found != fold.skipped:
                message = f"a turn skipped {fold.skipped} duplicates of offsets {fold.first} to {fold.last}: {found}"
                self.fail(f"{message} lie there", fold.mark)

    def _unmatched(self, partition: int) -> None:
        """Events whose raw event had another event already, or is not there."""
        ended, start = sorted(self._ended), self.facts.starts["raw"].get(partition, 0)
        for offset, mark in self._orphans:
            place = mark.place._replace(topic=self.facts.topics["raw"], offset=offset)
            if offset < start:
                self._counts["before the raw kept"] += 1
            elif _holds(ended, offset):
                self.fail("a raw event became two events", place, mark)
            else:
                self.fail("an event names a raw event that does not exist", mark, place)

    def finish(self) -> None:
        self.finding.facts |= {what: count for what, count in self._counts.items() if count}


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
