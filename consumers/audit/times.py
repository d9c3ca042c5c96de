"""The law about time: no slot's time falls, and nothing says a time that its slot had not reached."""

from __future__ import annotations

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law
from millrace.consumers.audit.rows import Mark, Row
from millrace.schemas.records import Completion, Grant, LedgerEntry, Resolution, Turn, WeightVersion


class Times(Law):
    """Log time is refine's clock, passed on from stage to stage: it rises within each slot of each stage, and so do the
    times of versions and of what dispatch writes."""

    name = "times"
    sentence = "time never falls within a slot, nor from version to version"
    unit = "times"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._last: dict[tuple[str, int], tuple[int, Mark]] = {}

    def _see(self, what: str, lane: int, time: int, row: Row) -> None:
        self.finding.checked += 1
        last = self._last.get((what, lane))
        if last is not None and time < last[0]:
            self.fail(f"the time of {what} falls by {last[0] - time} µs", last[1], row)
        if last is None or time > last[0]:
            self._last[what, lane] = (time, row.mark)

    def weights(self, row: Row[WeightVersion]) -> None:
        self._see("weights", 0, row["time"], row)

    def ledger(self, row: Row[LedgerEntry]) -> None:
        self._see("ledger", 0, row["time"], row)

    def resolution(self, row: Row[Resolution]) -> None:
        self._see("resolutions", 0, row["time"], row)

    def grant(self, row: Row[Grant]) -> None:
        self._see("grants", row.place.partition, row["time"], row)

    def completion(self, row: Row[Completion]) -> None:
        self._see("completions of seal's slot", row["slot"], row["time"], row)

    def turn(self, row: Row[Turn]) -> None:
        self._see(f"turns of {row['stage']}", row["slot"], row["now"], row)

    def event(self, row: Row) -> None:
        time = row["time"] if row.name == "Progress" else row["log_time"]
        if time is None:
            self.fail("an event has no log time", row, event=row["id"])
        else:
            self._see("events", row.place.partition, time, row)
