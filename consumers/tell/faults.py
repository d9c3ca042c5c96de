"""What went wrong on the way, read from what it left in the log: generations of learners, and silences of stages.

A learner that dies or joins raises its group's generation; a stage that dies stops writing turns, of which dispatch and
refine write at least one a second while they live. Invariant: pure; a quiet system is not taken for a dead one, since
the clock stage writes progress every second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from millrace.schemas.records import LedgerEntry

SECOND = 1_000_000
SILENT_S = 2.5
"""a slot that writes every second and was silent for longer was down"""
NEAR = 1_500_000
"""micros within which silences begin and end together"""
NEAR_SLOTS = 16
SLOW = 2.5
"""a version that took this many times the median stands out"""


@dataclass(frozen=True, slots=True)
class LearnerChange:
    """Between two versions the learners changed."""

    version: int
    time: int
    generation: int
    before: int
    """ranks"""
    after: int
    what: str
    gap: float
    """seconds between the two commits"""
    usual: float
    """median seconds between commits"""


@dataclass(frozen=True, slots=True)
class QuietStages:
    """Slots of stages wrote nothing at the same time. Times in micros."""

    slots: tuple[str, ...]
    since: int
    until: int

    @property
    def seconds(self) -> float:
        return (self.until - self.since) / SECOND


def changes(ledger: Sequence[LedgerEntry]) -> tuple[LearnerChange, ...]:
    """Every change of generation, and every version that took far longer than most."""
    steps = [entry for entry in ledger if entry["version"] > 0]
    gaps = [(b["time"] - a["time"]) / SECOND for a, b in pairwise(steps)]
    median_gap = median(gaps) if gaps else 0.0
    faults = []
    for before, after, gap in zip(steps, steps[1:], gaps, strict=False):
        has_moved = after["generation"] != before["generation"]
        if has_moved or (median_gap and gap > SLOW * median_gap and gap > 1):
            text = _membership_change(before, after) if has_moved else "took long, with the same learners"
            ranks = len(before["ranks"]), len(after["ranks"])
            faults.append(
                LearnerChange(after["version"], after["time"], after["generation"], *ranks, text, gap, median_gap)
            )
    return tuple(faults)


def _membership_change(before: LedgerEntry, after: LedgerEntry) -> str:
    """Who left and who came."""
    members_before, members_after = ({rank["member"] for rank in entry["ranks"]} for entry in (before, after))
    leavers, came = len(members_before - members_after), len(members_after - members_before)
    parts = []
    if leavers:
        parts.append(f"{leavers} learner{'s' * (leavers > 1)} left")
    if came:
        parts.append(f"{came} learner{'s' * (came > 1)} joined")
    if after["leader"] != before["leader"]:
        parts.append("another one leads")
    return ", ".join(parts) or "the same learners regrouped"


def silences(turns: Mapping[str, Sequence[int]], ledger: Sequence[LedgerEntry]) -> tuple[QuietStages, ...]:
    """Gaps between the turns of slots, the first in time first; slots that fall silent together count as one. What was
    over before the first version was trained is the start of the deployment, in which nobody hurries. turns: when each
    of a slot was written, micros."""
    began = next((entry["time"] for entry in ledger if entry["version"] > 0), 0)
    gaps = sorted(
        (since, until, slot)
        for slot, times in turns.items()
        for since, until in pairwise(times)
        if until - since > SILENT_S * SECOND and until > began
    )
    out: list[QuietStages] = []
    for since, until, slot in gaps:
        near = [s for s in out[-NEAR_SLOTS:] if abs(s.since - since) < NEAR and abs(s.until - until) < NEAR]
        if near:
            out[out.index(near[0])] = replace(near[0], slots=tuple(sorted({*near[0].slots, slot})))
        else:
            out.append(QuietStages((slot,), since, until))
    return tuple(out)
