"""Unit tests as a verifier: which files they are, and what their end says. Pure; `running` runs them.

A task carries `tests = {"files": {"test_sort.py": "..."}}`; the episode's output is the program that they test.

Invariants: a file of a task lies below the private directory and never takes the program's place; what a program does
to its own process (an early exit, a crash, an endless loop) is a value of 0, and only what is no fault of the program
(no tests, a command that cannot start) is a labelled failure; with a report, a test that it does not show as passed
did not pass."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from millrace.schemas import bounds
from millrace.streams.reward.pool import Verdict

NO_TESTS = "no_tests"
"""failure: the task has none"""
BAD_TESTS = "bad_tests"
"""failure: the task's tests are no files with relative names, or one has the program's name"""
NOT_STARTED = "not_started"
"""failure: the command could not be started"""
TAIL = 2000
"""characters of what the tests printed that a verdict keeps"""
_FENCED = re.compile(r"^[ \t]*(`{3,})[^\n`]*\n(.*?)^[ \t]*\1`*[ \t]*$", re.MULTILINE | re.DOTALL)


class How(Enum):
    """How a run of tests ended."""

    EXITED = "exited"
    TIMEOUT = "timeout"
    NOT_STARTED = "not_started"


class Ran(NamedTuple):
    """A run: how it ended, its exit status (negative: the signal that ended it), the end of what it printed, and its
    report, None where it wrote none."""

    how: How
    status: int
    printed: str
    report: bytes | None


def program(output: str) -> str:
    """The program in an output: its last fenced block, or all of it where there is none."""
    blocks = _FENCED.findall(output)
    return blocks[-1][1] if blocks else output


def files(task: Mapping[str, Any], name: str) -> dict[str, str]:
    """The files of a task's tests by relative name. name: of the program. Raises ValueError with the failure."""
    tests = task.get("tests")
    if tests is None:
        raise ValueError(NO_TESTS)
    found = tests.get("files") if isinstance(tests, dict) else None
    if not isinstance(found, dict) or len(found) > bounds.NAMES:
        raise ValueError(BAD_TESTS)
    if not found:
        raise ValueError(NO_TESTS)
    for path, text in found.items():
        if not isinstance(text, str) or not _is_below(path) or PurePosixPath(path) == PurePosixPath(name):
            raise ValueError(BAD_TESTS)
    return dict(found)


def verdict(ran: Ran, *, reported: bool) -> Verdict:
    """What a run says of the program. reported: the value is the share of tests that its JUnit report shows as passed;
    else 1 where the command ended with status 0."""
    if ran.how is How.NOT_STARTED:
        return Verdict(None, {}, None, None, NOT_STARTED)
    words = ran.printed[-TAIL:] or None
    passed, total = _counts(ran.report) if reported else (int(ran.status == 0), 1)
    if ran.how is How.TIMEOUT:
        label, passed = "timeout", 0
    elif ran.status < 0:
        label, passed = "killed", 0
    else:
        label = "passed" if total and passed == total else "failed"
    parts = {"tests.passed": float(passed), "tests.total": float(total)} if reported else {}
    value = passed / total if total else 0.0
    return Verdict(value, parts, label, words, None, confidence=1.0, signal="deterministic_check")


def _counts(report: bytes | None) -> tuple[int, int]:
    """(passed, all) tests of a JUnit report; none where it cannot be read. A skipped test is none."""
    if report is None:
        return 0, 0
    try:
        cases = list(ET.fromstring(report).iter("testcase"))  # expat itself refuses bombs of entities
    except (ET.ParseError, ValueError, LookupError):
        return 0, 0
    run = [case for case in cases if case.find("skipped") is None]
    return sum(case.find("failure") is None and case.find("error") is None for case in run), len(run)


def _is_below(path: str) -> bool:
    """Whether a name is of a file below the directory that it is taken from."""
    parts = path.split("/")
    return (
        "\0" not in path
        and all(part not in ("", ".", "..") for part in parts)
        and len(path.encode("utf-8", "replace")) <= bounds.NAME_BYTES
    )
