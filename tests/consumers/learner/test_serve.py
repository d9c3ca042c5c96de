"""What a learner shows of its versions."""

from __future__ import annotations

import io
from typing import Any, cast

import pytest
from rich.console import Console

from millrace.consumers.learner.serve import LearnerScreen
from millrace.schemas.records import LedgerEntry

METRICS = {
    "tokens_per_second": 1200.0, "staleness_mean": 0.5, "entropy": 1.25, "kl": 0.002, "clipped": 0.05,
    "reward_mean": 0.75, "loss": 0.125, "mfu": 0.4,
}  # fmt: skip
NUMBERS = "loss 0.1250  reward 0.750  staleness 0.50  entropy 1.250  KL 0.0020  clipped 5.0%  1,200 tokens/s  MFU 40.0%"


def entry(version: int, *, lost: str | None = None, unchanged: str | None = None) -> LedgerEntry:
    made: Any = {
        "version": version, "metrics": METRICS, "eta": 2, "ranks": [{}], "groups": [{"lost": lost}],
        "unchanged": unchanged,
    }  # fmt: skip
    return cast(LedgerEntry, made)


def show(entries: list[LedgerEntry], *, terminal: bool, versions: int = 0, width: int = 200) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, no_color=True, legacy_windows=False)
    with LearnerScreen("pilot", versions, console) as screen:
        for one in entries:
            screen.show(one)
    return file.getvalue()


def stays(said: str) -> list[str]:
    """The lines that are left on a terminal: of each, what follows the last time that it was wiped."""
    return [line.rpartition("\x1b[2K")[2] for line in said.split("\n")]


def test_a_log_gets_a_line_a_version() -> None:
    said = show([entry(1), entry(2)], terminal=False)
    first, second = said.splitlines()
    assert first.startswith(f"v1  {NUMBERS}  ")
    assert second.startswith(f"v2  {NUMBERS}  ")


@pytest.mark.parametrize("versions", [0, 9])
def test_a_terminal_gets_one_live_line(versions: int) -> None:
    live, *rest = stays(show([entry(1), entry(2)], terminal=True, versions=versions))
    assert f"pilot v2  {NUMBERS}" in live
    assert ("2/9" in live) == (versions == 9)
    assert "v1" not in live + "".join(rest)


def test_a_narrow_terminal_loses_no_number() -> None:
    said = "".join(show([entry(1)], terminal=True, width=60).split())
    assert "MFU40.0%" in said
    assert "ranks1" in said


def test_what_went_wrong_stays_on_a_terminal() -> None:
    kept = stays(show([entry(1, lost="gone"), entry(2, unchanged="not finite"), entry(3)], terminal=True))
    assert [line[:2] for line in kept if line.startswith("v")] == ["v1", "v2"]
    assert "1 groups lost" in kept[0]
    assert "unchanged: not finite" in kept[1]
    assert "pilot v3" in kept[2]
