"""The base of every law: a visitor that sees the rows it asks for and says what breaks its sentence; what it sees, and
what an audit finds: per law how much was checked, what broke it, and where to begin looking.

Invariants: a law never reads the log itself; what it remembers grows with groups and versions, and by 8 to 16 bytes a
record where it must remember records; a law holds iff it has no violation; violations beyond those that are listed are
counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from millrace.consumers.audit.facts import Facts
from millrace.infra.log.base import Place, Record
from millrace.infra.log.history.rows import Mark, Row
from millrace.schemas.arrays import unpack
from millrace.schemas.records import Event, Lineage, Trajectory

INELIGIBLE = frozenset({"denied", "audit_only"})
"""eligibilities that never train"""
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class SealedTrace:
    """The arrays of one lineage. All of length T when they are consistent."""

    def __init__(self, lineage: Lineage) -> None:
        self.id: str = lineage["id"]
        self.calls: list[str] = lineage["calls"]
        self.tokens: Ints = unpack(lineage["tokens"])
        self.mask: npt.NDArray[np.bool_] = unpack(lineage["mask"]).astype(bool)
        self.logprobs: Floats = unpack(lineage["logprobs"])
        self.versions: Ints = unpack(lineage["versions"])

    @property
    def even(self) -> bool:
        """Whether all arrays have one length."""
        return len({len(self.tokens), len(self.mask), len(self.logprobs), len(self.versions)}) == 1

    @property
    def trained_versions(self) -> Ints:
        """Versions of the trainable tokens, as far as the arrays go."""
        size = min(len(self.mask), len(self.versions))
        return self.versions[:size][self.mask[:size]]


class SealedSample:
    """A sealed trajectory and the model calls it names (None where an event is gone)."""

    def __init__(self, row: Row[Trajectory], places: Sequence[Place], calls: Sequence[Row[Event] | None]) -> None:
        self.row = row
        self.events = places
        self.calls = calls

    @cached_property
    def traces(self) -> list[SealedTrace]:
        """Its lineages. Raises CorruptRecord for arrays that are none."""
        return [SealedTrace(lineage) for lineage in self.row["lineages"]]

    @cached_property
    def trained_versions(self) -> Ints:
        """int32: the version of every trainable token of every lineage."""
        parts = [trace.trained_versions for trace in self.traces]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    @property
    def ids(self) -> dict[str, str | int]:
        """What names it in a violation."""
        ids: dict[str, str | int] = {"trajectory": self.row["id"], "group": self.row["group"]}
        if self.row["ticket"] is not None:
            ids["ticket"] = self.row["ticket"]
        return ids


LIST_LIMIT = 50
"""violations kept a law; the rest are counted"""


@dataclass(frozen=True, slots=True)
class Violation:
    """One way in which a law is broken. `records` are the places that show it; `time` (micros) is the newest's."""

    law: str
    message: str
    records: tuple[Place, ...]
    ids: Mapping[str, str | int]
    time: int

    def as_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "law": self.law,
            "message": self.message,
            "records": [place._asdict() for place in self.records],
            "ids": dict(self.ids),
            "time": self.time,
        }


@dataclass(slots=True)
class LawFinding:
    """What one law came to. `checked` counts `unit`s; `notes` say what could not be looked at and why."""

    law: str
    sentence: str
    unit: str
    checked: int = 0
    broken: int = 0
    violations: list[Violation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, int | float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return not self.broken

    def add(self, violation: Violation) -> None:
        """Count a violation and keep it if there is room."""
        self.broken += 1
        if len(self.violations) < LIST_LIMIT:
            self.violations.append(violation)

    def as_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "law": self.law,
            "sentence": self.sentence,
            "holds": self.holds,
            "checked": self.checked,
            "unit": self.unit,
            "broken": self.broken,
            "violations": [violation.as_json() for violation in self.violations],
            "notes": self.notes,
            "facts": self.facts,
        }


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The whole audit of one policy."""

    namespace: str
    policy: str
    release: str
    findings: tuple[LawFinding, ...]
    notes: tuple[str, ...]
    records: Mapping[str, int]
    """records read by topic"""

    @property
    def clean(self) -> bool:
        return all(finding.holds for finding in self.findings)

    @property
    def violations(self) -> list[Violation]:
        """Every kept violation, the first in time first; at the same time, in the order of the laws."""
        return sorted((v for finding in self.findings for v in finding.violations), key=lambda v: v.time)

    def finding(self, law: str) -> LawFinding:
        """The finding of a law by name. Raises KeyError for a law that was not audited."""
        for finding in self.findings:
            if finding.law == law:
                return finding
        raise KeyError(law)

    def as_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "namespace": self.namespace,
            "policy": self.policy,
            "release": self.release,
            "clean": self.clean,
            "findings": [finding.as_json() for finding in self.findings],
            "first": self.violations[0].as_json() if self.violations else None,
            "notes": list(self.notes),
            "records": dict(self.records),
        }


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
