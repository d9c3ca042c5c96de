"""The table of conformance at the end of a run, from whichever process the cases ran in.

A plugin of the run itself, since with several workers the tests' own conftest is loaded in those alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CONFORMANCE = "conformance"
"""the property of a test's report that is a row; `MILLRACE_CONFORMANCE_TABLE` names a file for the table"""
HEAD = (
    "| layout | model | loss, relative (absolute) | gradient norm, relative | weight, absolute |",
    "|---|---|---|---|---|",
)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = [
        str(value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
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
