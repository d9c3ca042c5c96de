"""Tables at the end of a run, from whichever process the tests ran in: how long each folder and the longest files took,
where the slowest tests are asked for too (`--durations`), and conformance, where its cases ran.

A plugin of the run itself, since with several workers the tests' own conftest is loaded in those alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath

import pytest

CONFORMANCE = "conformance"
"""the property of a test's report that is a row; `MILLRACE_CONFORMANCE_TABLE` names a file for the table"""
HEAD = (
    "| layout | model | loss, relative (absolute) | gradient norm, relative | weight, absolute |",
    "|---|---|---|---|---|",
)


FILES = 20
"""how many files are listed"""


def folder(nodeid: str) -> str:
    """The part of the tests that a test belongs to: `tests/consumers`, or `tests` where its file lies there itself."""
    return str(PurePosixPath(*PurePosixPath(file(nodeid)).parent.parts[:2]))


def file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def seconds(reports: Iterable[pytest.TestReport], part: Callable[[str], str]) -> Sequence[tuple[str, float, int]]:
    """(part, seconds, tests) of each part, the longest first. Seconds are those of tests with all that was made and
    removed for them; what tests share counts for the first that asks for it."""
    taken: dict[str, float] = {}
    tests: dict[str, set[str]] = {}
    for report in reports:
        name = part(report.nodeid)
        taken[name] = taken.get(name, 0.0) + report.duration
        tests.setdefault(name, set()).add(report.nodeid)
    return [(name, spent, len(tests[name])) for name, spent in sorted(taken.items(), key=lambda one: (-one[1], one[0]))]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [
        report
        for listed in terminalreporter.stats.values()
        for report in listed
        if isinstance(report, pytest.TestReport)
    ]
    if terminalreporter.config.getoption("durations") is not None:
        _times(terminalreporter, reports)
    _conformance(terminalreporter, reports)


def _times(terminalreporter: pytest.TerminalReporter, reports: Sequence[pytest.TestReport]) -> None:
    parts = seconds(reports, folder)
    terminalreporter.write_sep("=", "seconds by folder")
    for name, spent, tests in [*parts, ("all", sum(spent for _, spent, _ in parts), sum(n for *_, n in parts))]:
        terminalreporter.write_line(f"{spent:9.1f} s  {tests:5d} tests  {name}")
    terminalreporter.write_sep("=", f"longest {FILES} files")
    for name, spent, tests in seconds(reports, file)[:FILES]:
        terminalreporter.write_line(f"{spent:9.1f} s  {tests:5d} tests  {name}")


def _conformance(terminalreporter: pytest.TerminalReporter, reports: Sequence[pytest.TestReport]) -> None:
    rows = [
        str(value)
        for report in reports
        if report.when == "call"
        for name, value in report.user_properties
        if name == CONFORMANCE
    ]
    if not rows:
        return
    text = "\n".join([*HEAD, *rows]) + "\n"
    terminalreporter.write_sep("=", "conformance with one process of torch")
    terminalreporter.write_line(text)
    if target := os.environ.get("MILLRACE_CONFORMANCE_TABLE"):
        Path(target).write_text(text)
