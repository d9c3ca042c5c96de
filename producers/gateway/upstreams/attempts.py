"""Whether a call that failed is sent again, and to whom.

Invariants: only what the same bytes may succeed with is sent again: no answer at all, or one that says so by its
status; an upstream that stays silent until the time-out is not asked twice, since each silence lasts minutes; each
upstream is asked at most once and `retries` times more; no wait is longer than `LONGEST_S`."""

from __future__ import annotations

from typing import Literal, NamedTuple

FIRST_S = 0.5
"""the wait before the first retry; each further one is twice as long"""
LONGEST_S = 20.0
"""the longest wait; an upstream that asks for a longer one is not asked again"""
PASSING = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
"""statuses that may pass"""


class AttemptFailure(NamedTuple):
    """How an attempt failed: the status of its answer, None where none came. `wait_s`: seconds after which the upstream
    wants to be asked again, where it says so. `is_silent`: it said nothing until the time-out."""

    status: int | None
    wait_s: float | None = None
    is_silent: bool = False


class Retry(NamedTuple):
    """The same upstream is asked once more, after so many seconds."""

    wait_s: float


Next = Retry | Literal["fallback", "end"]


def passing(status: int) -> bool:
    """Whether an answer of this status may be another one the next time."""
    return status in PASSING


def after(failure: AttemptFailure, attempt: int, retries: int, *, behind: bool, first_s: float = FIRST_S) -> Next:
    """What comes after the attempt number `attempt` (from 1) at an upstream failed. `behind`: another one follows."""
    if failure.status is not None and not passing(failure.status):
        return "end"
    wait = failure.wait_s if failure.wait_s is not None else first_s * 2.0 ** min(attempt - 1, 16)
    if failure.wait_s is None:
        wait = min(wait, LONGEST_S)
    if attempt <= retries and not failure.is_silent and 0 <= wait <= LONGEST_S:
        return Retry(wait)
    return "fallback" if behind else "end"


def retry_after(text: str | None) -> float | None:
    """Seconds of a `retry-after` header; None for a date, or none at all."""
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 9:
        return None
    return float(text)
