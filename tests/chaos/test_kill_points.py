"""Every kill point of the learner and the runner once, on a whole deployment with the light engine; then the audit.

Two of each in a round, to save time: who passes an armed point dies, be it one process or several, and none knows of
the deaths of others. `make chaos` takes the points one by one."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from millrace.apps.demo.fleet import BROKER
from tests.chaos.__main__ import audit, points
from tests.chaos.arena import START_S
from tests.chaos.deploy import SMALL, deploy

LEARNER, RUNNER = ("learner.", "checkpoint."), ("runner.", "transactor.")
EACH = 2
"""points of the learner, and of the runner, in a round"""


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.timeout(1800)
def test_every_kill_point_of_learner_and_runner_is_survived(tmp_path: Path) -> None:
    kinds = [points(*LEARNER), points(*RUNNER)]
    starts = range(0, max(map(len, kinds)), EACH)
    rounds = [[name for kind in kinds for name in kind[start : start + EACH]] for start in starts]
    assert sorted(chain(*rounds)) == sorted(chain(*kinds)), "each point is in one round"
    assert min(map(len, kinds)) > 5
    arena = deploy(tmp_path / "home", seed=0, engine="inprocess", **SMALL)
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
