"""Unit tests as a verifier: which files they are, and what their end says. Pure; `running` runs them.

A task carries `tests = {"files": {"test_sort.py": "..."}, "count": 3}`; the episode's output is the program that they
test. `count`, how many tests there are, may be left out.

Invariants: a file of a task lies below the private directory and never takes the program's place; what a program does
to its own process (an early exit, a crash, an endless loop) is a value of 0, and only what is no fault of the program
(no tests, a command that cannot start) is a labelled failure; with a report, a test that it does not show as passed
(a skipped one, one of `count` that it lacks) did not pass, and a report counts only beside the exit status that it
explains; all that reads an output takes time linear in its length."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from enum import Enum
from itertools import accumulate
from pathlib import PurePosixPath
from typing import NamedTuple

from millrace.schemas import bounds
from millrace.streams.reward.pool import Verdict

NO_TESTS = "no_tests"
"""failure: the task has none"""
BAD_TESTS = "bad_tests"
"""failure: the task's tests are no files with relative names, or one has the program's name"""
NO_START = "not_started"
"""failure: the command could not be started"""
FAILURE_TAGS = ("failure", "error", "skipped")
"""what a test that did not pass has in a JUnit report; pytest writes an expected failure as skipped"""
TESTS = 1_000_000
"""most tests that a task may say it has"""
TAIL = 2000
"""characters of what the tests printed that a verdict keeps"""
_OPENS = re.compile(r"[ \t]*(`{3,})[^`]*")
_CLOSES = re.compile(r"[ \t]*(`{3,})[ \t]*")


class How(Enum):
    """How a run of tests ended."""

    EXIT = "exited"
    TIMEOUT = "timeout"
    NO_START = "not_started"


class Ran(NamedTuple):
    """A run: how it ended, its exit status (negative: the signal that ended it), the end of what it printed, and its
    report, None where it wrote none."""

    how: How
    status: int
    output: str
    report: bytes | None


def program(output: str) -> str:
    """The program in an output: its last fenced block, or all of it where there is none. A fence that nothing closes
    opens no block."""
    lines = output.split("\n")
    closing = [len(fence[1]) if (fence := _CLOSES.fullmatch(line)) else 0 for line in lines]
    longest = [0, *accumulate(reversed(closing), max)][::-1]  # of the fences from a line on
    block: tuple[int, int] | None = None
    start = ticks = 0
    for at, line in enumerate(lines):
        if ticks:
            if closing[at] >= ticks:
                block, ticks = (start, at), 0
        elif (fence := _OPENS.fullmatch(line)) and longest[at + 1] >= len(fence[1]):
            start, ticks = at + 1, len(fence[1])
    return output if block is None else "".join(f"{line}\n" for line in lines[slice(*block)])


def files(task: Mapping[str, object], name: str) -> dict[str, str]:
    """The files of a task's tests by relative name. name: of the program. Raises ValueError with the failure."""
    tests = task.get("tests")
    if tests is None:
        raise ValueError(NO_TESTS)
    texts = tests.get("files") if isinstance(tests, dict) else None
    if not isinstance(texts, dict) or len(texts) > bounds.NAMES:
        raise ValueError(BAD_TESTS)
    if not texts:
        raise ValueError(NO_TESTS)
    for path, text in texts.items():
        if not isinstance(text, str) or not _is_below(path) or PurePosixPath(path) == PurePosixPath(name):
            raise ValueError(BAD_TESTS)
    return dict(texts)


def count(task: Mapping[str, object]) -> int:
    """How many tests a task says it has, 0 where it does not say. Raises ValueError with the failure."""
    number = tests.get("count", 0) if isinstance(tests := task.get("tests"), dict) else 0
    if type(number) is not int or not 0 <= number <= TESTS:
        raise ValueError(BAD_TESTS)
    return number


def verdict(ran: Ran, *, by_report: bool, count: int = 0) -> Verdict:
    """What a run says of the program. by_report: the value is the share of tests that its JUnit report shows as passed,
    of `count` at least; else 1 where the command ended with status 0."""
    if ran.how is How.NO_START:
        return Verdict(None, {}, None, None, NO_START)
    words = ran.output[-TAIL:] or None
    passes, total = _counts(ran.report, count) if by_report else (int(ran.status == 0), 1)
    if ran.status not in (0, 1) or (ran.status == 1 and passes == total):
        passes = 0  # its tests were stopped, or it says that one failed which the report does not show
    if ran.how is How.TIMEOUT:
        label, passes = "timeout", 0
    elif ran.status < 0:
        label, passes = "killed", 0
    else:
        label = "passed" if total and passes == total else "failed"
    parts = {"tests.passed": float(passes), "tests.total": float(total)} if by_report else {}
    value = passes / total if total else 0.0
    return Verdict(value, parts, label, words, None, confidence=1.0, signal="deterministic_check")


def _counts(report: bytes | None, least: int) -> tuple[int, int]:
    """(passed, all) tests of a JUnit report; none passed where it cannot be read."""
    if report is None:
        return 0, least
    try:
        cases = list(ET.fromstring(report).iter("testcase"))  # expat itself refuses bombs of entities
    except (ET.ParseError, ValueError, LookupError):
        return 0, least
    passes = sum(all(case.find(word) is None for word in FAILURE_TAGS) for case in cases)
    return passes, max(len(cases), least)


def _is_below(path: str) -> bool:
    """Whether a name is of a file below the directory that it is taken from."""
    parts = path.split("/")
    return (
        "\0" not in path
        and all(part not in ("", ".", "..") for part in parts)
        and len(path.encode("utf-8", "replace")) <= bounds.NAME_BYTES
    )
