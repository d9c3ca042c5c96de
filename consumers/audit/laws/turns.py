"""Laws about turns: every record was folded once, stages wrote what their turns say, and nobody else wrote there."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law
from millrace.infra.log.base import Record
from millrace.infra.log.history.rows import Mark, Row
from millrace.infra.log.topics import turns_of
from millrace.schemas.records import Turn


class _Range(NamedTuple):
    number: int
    first: int
    last: int
    record_count: int
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
            if not self.facts.is_ours(span["topic"]):
                continue  # another policy's: audited with it
            where = (row["stage"], row["slot"], self.facts.kind(span["topic"]), span["partition"])
            record_count = span["count"] + span["skipped"]
            self._ranges[where].append(_Range(number, span["first"], span["last"], record_count, row.mark))

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
        for span in ranges:
            turn_ids = {**ids, "turn": span.number}
            low, high = np.searchsorted(offsets, [span.first, span.last + 1])
            if before is not None and span.first <= before.last:
                message = f"offsets {span.first} to {min(span.last, before.last)} are folded twice"
                self.fail(message, before.mark, span.mark, **turn_ids)
            elif span.last < span.first or span.first < 0:
                self.fail("a range ends before it begins, or begins before its topic", span.mark, **turn_ids)
            elif span.first < start and high - low > span.record_count:
                message = f"a turn read {span.record_count} records up to offset {span.last}: {high - low} lie there"
                self.fail(message, span.mark, **turn_ids)
            elif span.first >= start and high - low != span.record_count:
                message = f"a turn read {span.record_count} records of offsets {span.first} to {span.last}"
                self.fail(f"{message}: {high - low} lie there", span.mark, **turn_ids)
            elif self._skips_records(before, span, offsets, start):
                message = f"records before offset {span.first} were never folded"
                self.fail(message, *([before.mark] if before else []), span.mark, **turn_ids)
            before = span

    @staticmethod
    def _skips_records(before: _Range | None, span: _Range, offsets: npt.NDArray[np.int64], start: int) -> bool:
        """Whether committed records lie between two ranges, or before the first one of a slot's first turn."""
        if before is None:
            return span.number == 0 and start == 0 and bool(len(offsets)) and int(offsets[0]) < span.first
        low, high = np.searchsorted(offsets, [max(before.last + 1, start), span.first])
        return bool(high > low)


STAGE_TOPICS = ("events", "trajectories", "evaluations", "completions", "grants", "resolutions", "dead-letters")
"""kinds of topic that stages alone write"""
DIGITS = 18
"""of the number of a turn; a longer one is none"""


class Outputs(Law):
    """Every output carries the turn that wrote it, and every turn counts its outputs: both sides agree."""

    name = "outputs"
    sentence = "stages' topics hold exactly the records that their turns say they wrote"
    unit = "records"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._stages = frozenset(facts.stages.values())
        self._wrote: Counter[tuple[bytes, str]] = Counter()
        self._first: dict[tuple[bytes, str], Mark] = {}
        self._turns: dict[bytes, tuple[Mark, dict[str, int]]] = {}
        self._span: dict[bytes, tuple[int, int]] = {}
        """stage/slot -> first and last turn that is there"""

    def record(self, kind: str, record: Record) -> None:
        if kind not in STAGE_TOPICS:
            return
        self.finding.checked += 1
        turn = record.headers.get("turn")
        if turn is None:
            self.fail(f"a record of {kind} was written by no turn", Mark(record.place, record.timestamp))
            return
        if kind == "dead-letters" and _text(turn.rpartition(b"/")[0].rpartition(b"/")[0]) not in self._stages:
            return  # another policy's dispatch: audited with it
        self._wrote[turn, kind] += 1
        if (turn, kind) not in self._first:
            self._first[turn, kind] = Mark(record.place, record.timestamp)

    def turn(self, row: Row[Turn]) -> None:
        slot = f"{row['stage']}/{row['slot']}".encode()
        number = row["number"]
        counts = row["emitted"].items()
        outputs = {self.facts.kind(topic): count for topic, count in counts if self.facts.is_ours(topic)}
        self._turns[slot + b"/%d" % number] = (row.mark, outputs)
        first, last = self._span.get(slot, (number, number))
        self._span[slot] = (min(first, number), max(last, number))

    def finish(self) -> None:
        for (turn, kind), count in self._wrote.items():
            turn_row = self._turns.get(turn)
            if turn_row is None:
                if self._should_exist(turn):
                    message = f"a record of {kind} names turn {_text(turn)}, which does not exist"
                    self.fail(message, self._first[turn, kind])
            elif count > turn_row[1].get(kind, 0):
                message = f"turn {_text(turn)} wrote {turn_row[1].get(kind, 0)} records to {kind}, {count} lie there"
                self.fail(message, turn_row[0], self._first[turn, kind])
        for turn, (mark, outputs) in self._turns.items():
            for kind in STAGE_TOPICS:
                count, there = outputs.get(kind, 0), self._wrote.get((turn, kind), 0)
                if there < count and self.facts.begins_at_zero(kind):
                    self.fail(f"turn {_text(turn)} wrote {count} records to {kind}, {there} lie there", mark)

    def _should_exist(self, turn: bytes) -> bool:
        """Whether a turn of this name should be among those kept: neither older than the first nor newer than the last
        that was read. A slot of which none was read may have begun since the end was taken."""
        slot, _, number = turn.rpartition(b"/")
        stage, _, partition = _text(slot).rpartition("/")
        kind = turns_of(self.facts.kind(stage))
        if self.facts.stages.get(kind) != stage:
            return True  # anybody may write a header; no stage has this name
        if slot not in self._span:
            return self.facts.latest(kind) is None
        first, last = self._span[slot]
        if not number.isdigit() or len(number) > DIGITS:
            return True
        return first <= int(number) <= last or (int(number) > last and not self.facts.has_moved(kind, int(partition)))


def _text(name: bytes) -> str:
    """What a header says, whatever bytes it holds."""
    return name.decode(errors="replace")
