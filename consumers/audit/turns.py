"""The law that every record was folded once: what the turns of the stages say against what the topics hold."""

from __future__ import annotations

from array import array
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law
from millrace.consumers.audit.rows import Mark, Row
from millrace.infra.log.base import Record
from millrace.infra.log.topics import turns_of
from millrace.schemas.records import Turn


class _Range(NamedTuple):
    number: int
    first: int
    last: int
    taken: int
    mark: Mark


class Turns(Law):
    """A turn says which offsets it folded. Over the life of a slot they follow each other, no committed record is left
    out and none is folded twice, though offsets have holes. Keeps 8 bytes a record."""

    name = "turns"
    sentence = "turns are dense per slot, and their ranges hold every record once"
    unit = "turns"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._last: dict[tuple[str, int], tuple[int, Mark]] = {}
        self._ranges: defaultdict[tuple[str, int, str, int], list[_Range]] = defaultdict(list)
        self._offsets: defaultdict[tuple[str, int], array[int]] = defaultdict(lambda: array("q"))

    def record(self, kind: str, record: Record) -> None:
        self._offsets[kind, record.partition].append(record.offset)

    def turn(self, row: Row[Turn]) -> None:
        self.finding.checked += 1
        slot, number = (row["stage"], row["slot"]), row["number"]
        last = self._last.get(slot)
        ids: dict[str, str | int] = {"stage": row["stage"], "slot": row["slot"], "turn": number}
        if row["stage"] != self.facts.stages[row.kind]:
            self.fail(f"a turn of {row['stage']} lies among those of {self.facts.stages[row.kind]}", row, **ids)
            return
        if row.raw.key != str(row["slot"]).encode():
            self.fail(f"a turn of slot {row['slot']} has the key {row.raw.key!r}", row, **ids)
        if row["slot"] != row.place.partition:
            self.fail(f"a turn of slot {row['slot']} lies on partition {row.place.partition}", row, **ids)
        if last is not None and number != last[0] + 1:
            self.fail(f"turn {number} of a slot follows turn {last[0]}", last[1], row, **ids)
        elif (
            last is None
            and number
            and not self.facts.starts[turns_of(self.facts.kind(row["stage"]))].get(row.place.partition)
        ):
            self.fail(f"a slot begins with turn {number}", row, **ids)
        self._last[slot] = (number, row.mark)
        for span in row["ranges"]:
            if not self.facts.mine(span["topic"]):
                continue  # another policy's: audited with it
            where = (row["stage"], row["slot"], self.facts.kind(span["topic"]), span["partition"])
            taken = span["count"] + span["skipped"]
            self._ranges[where].append(_Range(number, span["first"], span["last"], taken, row.mark))

    def finish(self) -> None:
        for (stage, slot, kind, partition), ranges in self._ranges.items():
            ids: dict[str, str | int] = {"stage": stage, "slot": slot, "topic": kind, "partition": partition}
            offsets = np.array(self._offsets[kind, partition], np.int64)
            self._follow(ranges, offsets, ids, self.facts.starts.get(kind, {}).get(partition, 0))
        self.finding.facts["ranges"] = sum(map(len, self._ranges.values()))

    def _follow(
        self, ranges: list[_Range], offsets: npt.NDArray[np.int64], ids: dict[str, str | int], start: int
    ) -> None:
        """Ranges in the order of their turns against the offsets that the partition holds."""
        before: _Range | None = None
        for folded in ranges:
            named = {**ids, "turn": folded.number}
            low, high = np.searchsorted(offsets, [folded.first, folded.last + 1])
            if before is not None and folded.first <= before.last:
                message = f"offsets {folded.first} to {min(folded.last, before.last)} are folded twice"
                self.fail(message, before.mark, folded.mark, **named)
            elif folded.last < folded.first or folded.first < 0:
                self.fail("a range ends before it begins, or begins before its topic", folded.mark, **named)
            elif folded.first < start and high - low > folded.taken:
                message = f"a turn read {folded.taken} records up to offset {folded.last}: {high - low} lie there"
                self.fail(message, folded.mark, **named)
            elif folded.first >= start and high - low != folded.taken:
                message = f"a turn read {folded.taken} records of offsets {folded.first} to {folded.last}"
                self.fail(f"{message}: {high - low} lie there", folded.mark, **named)
            elif self._skipped(before, folded, offsets, start):
                message = f"records before offset {folded.first} were never folded"
                self.fail(message, *([before.mark] if before else []), folded.mark, **named)
            before = folded

    @staticmethod
    def _skipped(before: _Range | None, folded: _Range, offsets: npt.NDArray[np.int64], start: int) -> bool:
        """Whether committed records lie between two ranges, or before the first one of a slot's first turn."""
        if before is None:
            return folded.number == 0 and start == 0 and bool(len(offsets)) and int(offsets[0]) < folded.first
        low, high = np.searchsorted(offsets, [max(before.last + 1, start), folded.first])
        return bool(high > low)
