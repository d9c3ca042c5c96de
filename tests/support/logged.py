"""What the code under test wrote to its log. A process of a test run also hears from libraries, and from what an
earlier test left behind (asyncio names an unclosed connection when it is collected as garbage): who asserts on all
lines looks at those of the product alone."""

from __future__ import annotations

import logging

import pytest


def records(caplog: pytest.LogCaptureFixture, part: str = "millrace") -> list[logging.LogRecord]:
    """Records of this test from the loggers of a package or module of the product."""
    return [record for record in caplog.records if f"{record.name}.".startswith(f"{part}.")]


def lines(caplog: pytest.LogCaptureFixture, part: str = "millrace") -> list[str]:
    """Their messages."""
    return [record.getMessage() for record in records(caplog, part)]
