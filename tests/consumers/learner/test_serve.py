"""What a learner shows of its versions."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from millrace.consumers.learner.serve import LONGEST_S, LOOK_S, LearnerScreen, await_policy, check_peers, let_commit
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas.records import LedgerEntry
from tests.support.feed import feed, settings_for, start_policy
from tests.support.learners import Place, version

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


pytestmark = pytest.mark.slow

HEAVY = ("torch", "transformers", "deepspeed", "megatron", "vllm", "faust", "pyarrow")


class Clock:
    """Time that passes while somebody sleeps. `then`: happens in the second sleep."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.now = 0.0
        self.sleeps = 0
        self._then = then

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1
        if self.sleeps == 2:
            self._then()


def wait(place: Place, clock: Clock, stopping: Callable[[], bool] = lambda: False) -> None:
    let_commit(place.settings, place.bus, stopping, clock=clock, sleep=clock.sleep)


@pytest.mark.parametrize("begins", [True, False])
def test_who_starts_before_its_policy_waits_for_it_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, begins: bool
) -> None:
    """Until the policy begins, or until it is asked to stop."""
    settings, bus = settings_for(tmp_path, "127.0.0.1:1", "t")[0], MemoryBus()
    bus.ensure_topics(settings.layout.specs())
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if begins and len(sleeps) == 3:
            start_policy(settings, bus, tmp_path)

    with caplog.at_level(logging.WARNING):
        await_policy(settings, bus, lambda: not begins and len(sleeps) == 5, sleep=sleep)
    assert len(sleeps) == (3 if begins else 5)
    (said,) = [record.getMessage() for record in caplog.records if "waiting for policy" in record.getMessage()]
    assert "`millrace policy create --model DIR` writes version 0" in said


@pytest.fixture
def busy(place: Callable[..., Place]) -> Place:
    """A policy of which a whole batch is ready."""
    one: Place = place()
    feed(one.bus, one.settings, range(4))
    return one


def test_who_starts_lets_the_others_commit_the_version_that_is_due(busy: Place) -> None:
    clock = Clock(lambda: busy.learn(1))
    wait(busy, clock)
    assert (clock.sleeps, version(busy.bus, busy.settings)) == (2, 1)
    wait(busy, clock)
    assert clock.sleeps == 2, "nothing is ready: no version is due"


def test_who_starts_does_not_wait_for_groups(place: Callable[..., Place]) -> None:
    one, clock = place(), Clock()
    wait(one, clock)
    feed(one.bus, one.settings, range(3))
    wait(one, clock)
    assert clock.sleeps == 0


def test_who_starts_does_not_wait_for_ever(busy: Place) -> None:
    clock = Clock()
    wait(busy, clock)
    assert LONGEST_S <= clock.now < LONGEST_S + LOOK_S


def test_who_is_asked_to_stop_waits_no_longer(busy: Place) -> None:
    clock = Clock()
    wait(busy, clock, lambda: clock.sleeps == 3)
    assert clock.sleeps == 3


def test_nobody_is_there_at_first(busy: Place) -> None:
    assert check_peers(busy.settings, busy.bus) == 0


def test_what_waits_has_loaded_nothing_that_takes_processor() -> None:
    code = f"import sys, millrace.consumers.learner.serve; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]"
