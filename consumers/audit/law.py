"""The base of every law: a visitor that sees the rows it asks for and says what breaks its sentence.

Invariants: a law never reads the log itself; what it keeps grows with groups and versions, and by 8 to 16 bytes a
record where it must remember records."""

from __future__ import annotations

from typing import ClassVar

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.rows import Mark, Row, SealedSample
from millrace.consumers.audit.verdict import LawFinding, Violation
from millrace.infra.log.base import Place, Record


class Law:
    """One sentence that must hold. A subclass overrides the handlers of the records that it is about."""

    name: ClassVar[str]
    sentence: ClassVar[str]
    unit: ClassVar[str] = "records"

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.finding = LawFinding(self.name, self.sentence, self.unit)

    @classmethod
    def sees(cls, handler: str) -> bool:
        """Whether this law looks at what this handler is given."""
        return getattr(cls, handler, None) is not getattr(Law, handler, None)

    def fail(self, message: str, *records: Row | Mark | Place, **ids: str | int) -> None:
        """A violation; the records that show it come first to last."""
        marks = [record.mark if isinstance(record, Row) else record for record in records]
        places = tuple(mark.place if isinstance(mark, Mark) else mark for mark in marks)
        time = max((mark.time for mark in marks if isinstance(mark, Mark)), default=0)
        self.finding.add(Violation(self.name, message, places, ids, time))

    def note(self, text: str) -> None:
        """What could not be looked at, and why."""
        self.finding.notes.append(text)

    def record(self, kind: str, record: Record) -> None:
        """Every committed record as read, before it is decoded."""

    def unreadable(self, kind: str, record: Record, error: str) -> None:
        """A record that is none of those its topic holds."""

    def weights(self, row: Row) -> None:
        """A WeightVersion."""

    def ledger(self, row: Row) -> None:
        """A LedgerEntry."""

    def score(self, row: Row) -> None:
        """An Evaluation of a version."""

    def resolution(self, row: Row) -> None:
        """A Resolution."""

    def grant(self, row: Row) -> None:
        """A Grant."""

    def completion(self, row: Row) -> None:
        """A Completion."""

    def trajectory(self, sample: SealedSample) -> None:
        """A Trajectory of the training topic with its model calls."""

    def evaluation(self, row: Row) -> None:
        """A Trajectory of the evaluation topic."""

    def turn(self, row: Row) -> None:
        """A Turn of any stage."""

    def dead_letter(self, row: Row) -> None:
        """A DeadLetter."""

    def event(self, row: Row) -> None:
        """An Event of `events`, or a Progress."""

    def raw(self, row: Row) -> None:
        """An Event of `raw`."""

    def slot_end(self, partition: int) -> None:
        """Events and raw of this partition have been seen."""

    def finish(self) -> None:
        """Everything has been seen."""
