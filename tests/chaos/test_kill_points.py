"""Every kill point of the learner and the runner once, on a whole deployment with the light engine; then the audit.

One of each in a round, to save time: neither knows of the other's death. `make chaos` takes them one by one."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import pytest

from millrace.apps.demo.fleet import BROKER
from tests.chaos.__main__ import audit, points
from tests.chaos.arena import START_S
from tests.chaos.deploy import deploy

LEARNER, RUNNER = ("learner.", "checkpoint."), ("runner.", "transactor.")


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.timeout(1800)
def test_every_kill_point_of_learner_and_runner_is_survived(tmp_path: Path) -> None:
    rounds = [list(filter(None, pair)) for pair in zip_longest(points(*LEARNER), points(*RUNNER))]
    assert sum(len(names) for names in rounds) > 15
    arena = deploy(tmp_path / "home", seed=0, engine="inprocess")
    try:
        arena.settle(timeout_s=START_S)
        missed = [name for names in rounds for name in arena.kill_points(names, timeout_s=300)]
        arena.settle(2)
        arena.fleet.up((BROKER,))
        assert audit(arena)
        assert not missed, f"no process passed {missed}"
    finally:
        arena.close()
        arena.fleet.down()
