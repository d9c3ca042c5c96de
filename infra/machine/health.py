"""Whether a program that keeps ending is well, and what it said last. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

WINDOW_S = 600.0
"""ends that are longer ago are forgiven"""
OUTLIVED_S = 60.0
"""a program that has run for so long, and longer than its lives before, is well again"""
MOST = 300
"""characters of a line that are shown"""
FAULT = re.compile(r"\b(error|exception|fatal|critical|failed|cannot)\b|\w+(Error|Exception)\b", re.IGNORECASE)
TRACE = re.compile(r"^\s|^Traceback |^\s*File ")
UNSEEN = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class End(NamedTuple):
    """One end that nobody asked for; `started`: after it had run long enough to count as started."""

    at: float
    started: bool


def failing(state: str, up_s: float, ends: Sequence[End], now: float) -> bool:
    """Whether a program keeps ending. `ends`: oldest first; `up_s`: how long it runs now, 0 when it does not.

    One end is an accident. A program that did not start, or ended twice within `WINDOW_S`, is failing until it outlives
    both a minute and the longest of its lives in between."""
    if state in ("BACKOFF", "FATAL"):
        return True
    recent = [end for end in ends if now - end.at < WINDOW_S]
    if not recent:
        return False
    if not recent[-1].started and state != "RUNNING":
        return True
    lives = [later.at - end.at for end, later in pairwise(recent)]
    return bool(lives) and up_s < max(OUTLIVED_S, min(max(lives), WINDOW_S / 2))


def last_error(log: str) -> str:
    """The newest line of a log that tells of an error, else its newest line; without what a terminal would obey."""
    lines = [line for line in (UNSEEN.sub("", raw).rstrip() for raw in log.splitlines()) if line.strip()]
    told = next((line for line in reversed(lines) if FAULT.search(line) and not TRACE.match(line)), None)
    return (told or (lines[-1] if lines else "")).strip()[:MOST]
