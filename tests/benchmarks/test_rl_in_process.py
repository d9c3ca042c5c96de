"""Learning happens: the proof of `benchmarks/study_algorithms.py` at CI size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.rl_in_process import Behind, rehearse
from millrace.apps.demo import tiny
from millrace.trainers.algorithms.registry import algorithm
from millrace.trainers.learning import Schedule
from millrace.trainers.weights import checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    tiny.make_sort_policy(path, seed=0)
    return path


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["ppo", "dapo"])
def test_sampled_reward_rises(model: Path, name: str) -> None:
    done = rehearse(
        checkpoint.adopt(model), algorithm(name), Schedule(3e-4, 10), steps=50, groups=48, critic_lr=1e-3, refill=True
    )
    assert done.gain() >= 0.15
    assert done.state.step == 100


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["rloo", "reinforce++", "gspo", "cispo"])
def test_sampled_reward_rises_in_small_batches_too(model: Path, name: str) -> None:
    done = rehearse(checkpoint.adopt(model), algorithm(name), Schedule(3e-4, 10), steps=50, groups=24, refill=True)
    assert done.gain() >= 0.1


def test_a_short_rehearsal_fills_its_batches(tmp_path: Path) -> None:
    """The untrained model solves nothing: no group teaches anything, and no weight moves."""
    begin = tiny.random_state(0)
    done = rehearse(begin, algorithm("dapo"), Schedule(3e-4), steps=1, groups=2, group_size=2, refill=True)
    assert done.rewards == [0.0]
    assert done.state.step == 0


def test_the_sampler_lags_behind_by_so_many_versions() -> None:
    live = torch.nn.Linear(1, 1, bias=False)
    seen = []
    behind = Behind(live, 2)  # type: ignore[arg-type]
    for version in range(5):
        torch.nn.init.constant_(live.weight, version)
        seen.append(behind.sampler().state_dict()["weight"].item())
    assert seen == [0, 0, 0, 1, 2]
    assert Behind(live, 0).sampler() is live  # type: ignore[arg-type]
