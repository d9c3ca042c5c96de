"""What an audit says: per law how much was checked, what broke it, and where to begin looking.

Invariants: a law holds iff it has no violation; nothing is dropped in silence, since violations beyond the kept ones
are still counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.infra.log.base import Place

KEPT = 50
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
        if len(self.violations) < KEPT:
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
