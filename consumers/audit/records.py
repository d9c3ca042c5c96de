"""The law that comes before all others: what the topics hold can be read."""

from __future__ import annotations

from millrace.consumers.audit.law import Law
from millrace.infra.log.base import Record


class Records(Law):
    """Bad bytes are expected in raw, where anyone may write, and end there as dead letters; nowhere else."""

    name = "records"
    sentence = "every record decodes as what its topic holds (raw excepted: bad bytes end as dead letters)"

    def record(self, kind: str, record: Record) -> None:
        self.finding.checked += 1

    def unreadable(self, kind: str, record: Record, error: str) -> None:
        if kind != "raw":
            self.fail(f"a record of {kind} cannot be read: {error}", record.place)
