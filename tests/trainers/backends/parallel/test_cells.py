"""Every kind of objective in a cell of ranks that share positions or layers: as one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.algorithms.distill import Distill
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.algorithms.sft import Sft
from millrace.trainers.backends.parallel.schedules import INTERLEAVED
from millrace.trainers.backends.torch.compute import Compute
from millrace.trainers.weights import checkpoint
from tests.support.architectures import samples, tiny_state
from tests.support.ranks import Ranks
from tests.support.samples import random_samples, small_state
from tests.support.steps import train, train_in_cell

pytestmark = pytest.mark.slow

STATE = small_state(num_hidden_layers=4)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as pool:
        yield pool


OBJECTIVES = {
    "critic": policy("ppo"),
    "whole sequences and scores": policy("gspo", recompute=True),
    "entropies that learn": policy("gmpo", entropy_coef=0.05),
    "reference": policy("reinforce++-baseline", kl_coef=0.1),
    "teacher": Distill(),
}


@pytest.mark.parametrize("layout", ["torch:c2", "torch:p2"])
@pytest.mark.parametrize("algorithm", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_objectives_agree(ranks: Ranks, layout: str, algorithm: Algorithm) -> None:
    data = [random_samples(seed, groups=4) for seed in range(2)]
    reports, theirs = ranks.run(train, 1, STATE, algorithm, data, 60)[0]
    cell = ranks.run(train_in_cell, 2, layout, {}, STATE, algorithm, data, 60)
    ours = cell[0][1]
    assert ours is not None
    for mine, _ in cell:
        for report, other in zip(mine, reports, strict=True):
            assert len(report.shares) == 1
            assert report.shares == other.shares
            assert report.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=1.5e-6)
            assert report.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=5e-7)
            for name in {"value_loss", "value_grad_norm", "entropy", "kl"} & other.metrics.keys():
                assert report.metrics[name] == pytest.approx(other.metrics[name], rel=5e-6, abs=1e-6)
    for name, weight in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=0, atol=5e-5)
    for name, weight in theirs.critic.weights.items() if theirs.critic else ():
        torch.testing.assert_close(ours.critic.weights[name], weight, rtol=0, atol=5e-5)
    assert list(ours.weights) == list(theirs.weights), "in the order of the whole model"


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *((layout, "deepseek_v3") for layout in ("torch:d2", "torch:p2", "torch:c2", "torch:d2e2")),
        ("torch:t2", "qwen2_moe"),
    ],
)
def test_mixtures_agree_with_their_shared_experts_and_constants(
    ranks: Ranks, layout: str, kind: str, tmp_path: Path
) -> None:
    state, data = tiny_state(kind, tmp_path), [samples(8)]
    reports, theirs = ranks.run(train, 1, state, Sft(), data, 60)[0]
    mine, ours = ranks.run(train_in_cell, 2, layout, {}, state, Sft(), data, 60)[0]
    assert mine[0].metrics["loss"] == pytest.approx(reports[0].metrics["loss"], abs=1.5e-6)
    assert mine[0].metrics["grad_norm"] == pytest.approx(reports[0].metrics["grad_norm"], rel=1.5e-6)
    for name, weight in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=0, atol=2.3e-4)
    assert ours.constants.keys() == state.constants.keys()
    assert all(torch.equal(ours.constants[name], tensor) for name, tensor in state.constants.items())


@pytest.mark.parametrize(
    ("layout", "options", "atol"),
    [
        ("torch:c2", {}, 5e-5),
        ("torch:c2", {"compute": Compute(checkpointing=True, logits=256)}, 5e-5),
        ("torch:p2", {"schedule": INTERLEAVED}, 5e-5),
        ("torch:p2", {"compute": Compute(bf16=True, checkpointing=True)}, 5e-3),
    ],
)
def test_same_layout_same_bytes(ranks: Ranks, layout: str, options: dict[str, object], atol: float) -> None:
    data = [random_samples(0)]
    states = [ranks.run(train_in_cell, 2, layout, options, STATE, policy("grpo"), data, 60)[0][1] for _ in range(2)]
    first, second = (checkpoint.fingerprint(state) for state in states)
    assert first == second
    alone = ranks.run(train, 1, STATE, policy("grpo"), data, 60)[0][1]
    for name, weight in alone.weights.items():
        torch.testing.assert_close(states[0].weights[name], weight, rtol=0, atol=atol)
