"""Trackers show what the ledger holds: each version once, whoever committed it and whatever failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import pytest

from millrace.consumers import policy_names
from millrace.consumers.learner.version.metrics import Tracking, line
from millrace.schemas.records import LedgerEntry
from millrace.trainers.tracking.base import Tracker
from tests.support import tracked
from tests.support.feed import feed


class Kept(Tracker):
    """Keeps points in memory; fails while `broken`."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.broken = False
        self.closed = False

    @property
    def last(self) -> int:
        return self.points[-1][0] if self.points else -1

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.broken:
            raise OSError("no space left")
        self.points.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


def entry(version: int) -> LedgerEntry:
    made: Any = {"version": version, "metrics": {"loss": 1.0 / version} if version else {}}
    return cast(LedgerEntry, made)


class World:
    """A ledger, a tracker, and how often each was opened or read."""

    def __init__(self) -> None:
        self.ledger = [entry(0)]
        self.tracker = Kept()
        self.reads = 0

    def past(self) -> Iterator[LedgerEntry]:
        self.reads += 1
        yield from self.ledger

    def commit(self, tracking: Tracking | None) -> None:
        self.ledger.append(entry(len(self.ledger)))
        if tracking is not None:
            tracking.write(self.ledger[-1])

    def leader(self) -> Tracking:
        return Tracking(lambda: [self.tracker], self.past)

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.tracker.points]


def test_a_leader_writes_each_version_and_reads_no_ledger() -> None:
    world = World()
    tracking = world.leader()
    for _ in range(3):
        world.commit(tracking)
    assert world.tracker.points == [(1, {"loss": 1.0}), (2, {"loss": 0.5}), (3, {"loss": 1 / 3})]
    assert world.reads == 0
    tracking.close()
    assert world.tracker.closed


def test_what_a_killed_leader_did_not_write_is_filled_in_once() -> None:
    world = World()
    world.commit(world.leader())
    world.commit(None)  # killed after the commit
    world.commit(None)
    after = world.leader()
    world.commit(after)
    world.commit(after)
    assert world.steps == [1, 2, 3, 4, 5]
    assert world.reads == 1
    after.write(world.ledger[-1])
    assert world.steps == [1, 2, 3, 4, 5], "said twice"


def test_a_tracker_that_fails_stops_nothing_and_catches_up(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    tracking = world.leader()
    world.commit(tracking)
    world.tracker.broken = True
    world.commit(tracking)
    assert "version 2 is not tracked yet: no space left" in caplog.text
    world.tracker.broken = False
    world.commit(tracking)
    assert world.steps == [1, 2, 3]


def test_trackers_open_with_the_first_version_alone() -> None:
    opened = 0

    def open() -> list[Tracker]:
        nonlocal opened
        opened += 1
        return []

    tracking = Tracking(open, lambda: iter(()))
    tracking.close()
    assert opened == 0
    tracking.write(entry(1))
    tracking.write(entry(2))
    assert opened == 1


def test_a_version_is_one_line() -> None:
    made: Any = {
        "version": 7,
        "eta": 2,
        "ranks": [{}, {}],
        "groups": [{"lost": None}, {"lost": "gone"}],
        "unchanged": None,
        "metrics": {
            "reward_mean": 0.5,
            "staleness_mean": 0.75,
            "staleness_max": 1.0,
            "entropy": 1.25,
            "kl": 0.001,
            "clipped": 0.02,
            "tokens_per_second": 1234.5,
            "timings_step": 0.5,
            "loss": 0.01,
        },
    }
    assert line(cast(LedgerEntry, made)) == (
        "v7  loss 0.0100  reward 0.500  staleness 0.75  entropy 1.250  KL 0.0010  clipped 2.0%  1,234 tokens/s"
        "  oldest 1 of 2 versions  step 0.50 s  ranks 2  1 groups lost"
    )


@pytest.mark.slow
def test_the_ledger_of_a_real_learner_fills_a_tracker(place: Callable[..., Any]) -> None:
    it = place()
    feed(it.bus, it.settings, range(8))
    it.learn(2)
    chosen = it.settings.model_copy(
        update={"learner": it.settings.learner.model_copy(update={"trackers": ("jsonl", "tensorboard")})}
    )
    tracking = Tracking.of(chosen, it.bus, policy_names.topics(chosen)["ledger"])
    tracking.write(it.entries[-1])
    tracking.close()
    home = chosen.home / "tracking" / chosen.policy.name
    assert tracked.jsonl(home / "jsonl") == [(one["version"], dict(one["metrics"])) for one in it.entries]
    assert [step for step, _ in tracked.tensorboard(home / "tensorboard")] == [1, 2]
