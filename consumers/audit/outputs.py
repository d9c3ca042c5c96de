"""The law that stages wrote what their turns say, and that nobody else writes where only a stage may."""

from __future__ import annotations

from collections import Counter

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law
from millrace.consumers.audit.rows import Mark, Row
from millrace.infra.log.base import Record
from millrace.infra.log.topics import turns_of
from millrace.schemas.records import Turn

WRITTEN = ("events", "trajectories", "evaluations", "completions", "grants", "resolutions", "dead-letters")
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
        if kind not in WRITTEN:
            return
        self.finding.checked += 1
        mark = Mark(record.place, record.timestamp)
        turn = record.headers.get("turn")
        if turn is None:
            self.fail(f"a record of {kind} was written by no turn", mark)
            return
        if kind == "dead-letters" and _shown(turn.rpartition(b"/")[0].rpartition(b"/")[0]) not in self._stages:
            return  # another policy's dispatch: audited with it
        self._wrote[turn, kind] += 1
        self._first.setdefault((turn, kind), mark)

    def turn(self, row: Row[Turn]) -> None:
        slot = f"{row['stage']}/{row['slot']}".encode()
        number = row["number"]
        emitted = {self.facts.kind(topic): count for topic, count in row["emitted"].items() if self.facts.mine(topic)}
        self._turns[slot + b"/%d" % number] = (row.mark, emitted)
        first, last = self._span.get(slot, (number, number))
        self._span[slot] = (min(first, number), max(last, number))

    def finish(self) -> None:
        for (turn, kind), count in self._wrote.items():
            known = self._turns.get(turn)
            if known is None:
                if self._expected(turn):
                    message = f"a record of {kind} names turn {_shown(turn)}, which does not exist"
                    self.fail(message, self._first[turn, kind])
            elif count > known[1].get(kind, 0):
                message = f"turn {_shown(turn)} wrote {known[1].get(kind, 0)} records to {kind}, {count} lie there"
                self.fail(message, known[0], self._first[turn, kind])
        for turn, (mark, emitted) in self._turns.items():
            for kind in WRITTEN:
                count, there = emitted.get(kind, 0), self._wrote.get((turn, kind), 0)
                if there < count and self.facts.begins_at_zero(kind):
                    self.fail(f"turn {_shown(turn)} wrote {count} records to {kind}, {there} lie there", mark)

    def _expected(self, turn: bytes) -> bool:
        """Whether a turn of this name should be among those kept: neither older than the first nor newer than the last
        that was read. A slot of which none was read may have begun since the end was taken."""
        slot, _, number = turn.rpartition(b"/")
        stage, _, partition = _shown(slot).rpartition("/")
        kind = turns_of(self.facts.kind(stage))
        if self.facts.stages.get(kind) != stage:
            return True  # anybody may write a header; no stage has this name
        if slot not in self._span:
            return self.facts.latest(kind) is None
        first, last = self._span[slot]
        if not number.isdigit() or len(number) > DIGITS:
            return True
        return first <= int(number) <= last or (int(number) > last and not self.facts.moved(kind, int(partition)))


def _shown(name: bytes) -> str:
    """What a header says, whatever bytes it holds."""
    return name.decode(errors="replace")
