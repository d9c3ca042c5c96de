"""Every kill point lies on a way that is killed on; and a whole deployment whose versions are adapters, served by vLLM,
with a kill at each point of that way; then the audit.

Deltas and broadcasts are killed on in `tests/consumers/test_kills.py`, and in whole deployments by `make chaos`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.chaos.__main__ import ELSEWHERE, kill_points, points, suffer
from tests.chaos.deploy import SMALL, deploy
from tests.chaos.ways import WAYS, every_point, points_of


def test_every_point_is_killed_at_somewhere() -> None:
    ways = [points_of(way) for way in WAYS]
    assert all(ways)
    known = [*points(""), *(name for way in ways for name in way)]
    assert len(set(known)) == len(known), "a point lies on one way"
    assert set(every_point()) - set(known) == {name for name in every_point() if name.startswith(ELSEWHERE)}


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_adapters_survive_a_kill_at_every_point(tmp_path: Path) -> None:
    arena = deploy(tmp_path / "home", seed=0, engine="vllm", way="adapters", **SMALL)
    assert suffer(arena, partial(kill_points, names=points_of("adapters"), times=1, timeout_s=300), "adapters")
