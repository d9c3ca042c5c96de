"""Every kill point of the learner and the runner once, on a whole deployment with the light engine; then the audit."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.demo.fleet import BROKER
from tests.chaos.__main__ import audit, kill_points, points
from tests.chaos.deploy import deploy

PREFIXES = ("runner.", "transactor.", "learner.", "checkpoint.")


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.timeout(1800)
def test_every_kill_point_of_learner_and_runner_is_survived(tmp_path: Path) -> None:
    names = points(*PREFIXES)
    assert len(names) > 15
    arena = deploy(tmp_path / "home", seed=0, engine="inprocess")
    try:
        arena.settle()
        missed = kill_points(arena, names, times=1)
        arena.settle(2)
        arena.fleet.up((BROKER,))
        assert audit(arena)
        assert not missed, f"no process passed {missed}"
    finally:
        arena.close()
        arena.fleet.down()
