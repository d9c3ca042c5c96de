"""docs/troubleshooting.md names messages that exist: what a row begins with is a text of the source."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.support.documents import ROOT
from tests.support.house import ROOMS

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
ROWS = re.findall(r"^\| `(.+?)` \| `(millrace [^`]+)` \| .+ \| .+ \|$", PAGE, re.MULTILINE)


@cache
def texts() -> tuple[str, ...]:
    """Every text of the source, … for what differs."""
    found: list[str] = []
    for package in ROOMS:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = (str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                    found.append("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return tuple(found)


@pytest.mark.parametrize(("message", "command"), ROWS)
def test_the_message_of_a_row_exists(message: str, command: str) -> None:
    wanted = message if message.count("…") > 1 else message.removesuffix("…")
    assert any(wanted.strip() in text for text in texts()), message


def test_every_row_is_looked_at() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert len(rows) == len(ROWS) > 15
