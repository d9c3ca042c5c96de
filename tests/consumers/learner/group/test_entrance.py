"""What a learner does before it loads torch, over a bus in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from millrace.consumers.learner.group.entrance import LONGEST_S, LOOK_S, check_peers, let_commit
from tests.support.feed import feed
from tests.support.learners import Place, version

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
