from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.samples import random_samples, small_state
from tests.support.steps import train_share
from trainers import checkpoint
from trainers.algorithms.base import Algorithm
from trainers.algorithms.grpo import Grpo
from trainers.algorithms.sft import Sft
from trainers.backends.fsdp import TorchBackend
from trainers.batches.sample import Sample
from trainers.errors import BadConfiguration, BadSample
from trainers.learning import Report, Schedule, Trainer
from trainers.state import State


def trainer(algorithm: Algorithm, budget: int = 16384, state: State | None = None) -> Trainer:
    backend = TorchBackend(device="cpu")
    backend.form(0, 1, None, 30.0)
    backend.load(state or small_state())
    return Trainer(backend, algorithm, Schedule(1e-3), budget=budget)


def outcome(algorithm: Algorithm, samples: list[Sample], budget: int = 16384) -> tuple[Report, State]:
    made = trainer(algorithm, budget)
    report = train_share(made, samples, 0, 1)
    state = made.backend.gather()
    assert state is not None
    return report, state


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 200), st.randoms(), st.sampled_from([Grpo(), Grpo(decoupled=True)]))
def test_micro_batches_and_order_do_not_matter(seed: int, budget: int, draw: object, algorithm: Algorithm) -> None:
    samples = random_samples(seed, groups=3)
    shuffled = list(samples)
    draw.shuffle(shuffled)  # type: ignore[attr-defined]
    whole, whole_state = outcome(algorithm, samples)
    assert checkpoint.fingerprint(outcome(algorithm, shuffled)[1]) == checkpoint.fingerprint(whole_state)
    cut, _ = outcome(algorithm, shuffled, budget)
    assert cut.metrics["loss"] == pytest.approx(whole.metrics["loss"], abs=1.5e-6)
    assert cut.metrics["grad_norm"] == pytest.approx(whole.metrics["grad_norm"], rel=5e-7, abs=1e-6)
    for name in ("kl", "entropy", "clipped", "reward_mean", "staleness_mean", "tokens_trainable"):
        assert cut.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-4, abs=1e-6)


def test_the_report_counts() -> None:
    samples = random_samples(0, groups=4, group_size=3, version=10)
    silent = [replace(s, reward=None) if s.trajectory == "0.0" else s for s in samples]
    made = trainer(Grpo())
    report = train_share(made, silent, 0, 1, version=10, oldest=9)
    ages = [10 - int(v) for s in samples for v in s.versions[s.mask != 0]]
    masked = sum(
        1 for s in silent for m, v in zip(s.mask, s.versions, strict=True) if m and (v < 9 or s.reward is None)
    )
    rewards = {s.trajectory: s.reward for s in silent if s.reward is not None}
    assert report.metrics["tokens_trainable"] == sum(s.trainable for s in samples)
    assert report.masked_tokens == masked
    assert report.metrics["staleness_mean"] == pytest.approx(sum(ages) / len(ages))
    assert report.metrics["staleness_max"] == max(ages)
    assert report.metrics["reward_mean"] == pytest.approx(sum(rewards.values()) / len(rewards))
    assert report.metrics["samples_without_reward"] == 1
    (share,) = report.shares
    assert (share.samples, share.groups, share.tokens) == (12, 4, sum(s.length for s in samples))
    assert all(math.isfinite(value) for value in report.metrics.values())
    phases = [report.metrics[f"timings_{name}"] for name in ("forward", "backward", "optimizer", "other")]
    assert report.metrics["timings_step"] == pytest.approx(sum(phases))


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [replace(s, mask=s.mask * 0) for s in random_samples(0)],
    ],
    ids=["no samples", "all masked"],
)
def test_nothing_trainable_changes_no_byte(samples: list[Sample]) -> None:
    made = trainer(Grpo())
    report = made.train(samples, minibatches=[[0, 1, 2], [3, 4, 5]], version=0)
    state = made.backend.gather()
    assert state is not None
    assert report.unchanged == "nothing trainable in the batch"
    assert checkpoint.fingerprint(state) == checkpoint.fingerprint(small_state())
    assert report.metrics["steps"] == 0


def test_a_lost_minibatch_costs_only_its_own_step() -> None:
    made = trainer(Sft())
    report = made.train(random_samples(0, groups=2), minibatches=[[0], [7], [1]], version=0)
    assert report.metrics["steps"] == 2
    assert report.unchanged is None


def test_equal_rewards_pull_nowhere_and_are_no_error() -> None:
    samples = [replace(s, reward=1.0) for s in random_samples(0)]
    report, state = outcome(Grpo(), samples)
    assert report.metrics["grad_norm"] == 0
    assert report.unchanged is None
    assert state.step == 2


def test_impossible_samples_and_plans_are_refused_before_a_step() -> None:
    made = trainer(Sft())
    with pytest.raises(BadSample, match="outside"):
        train_share(made, random_samples(0, vocabulary=100), 0, 1)
    with pytest.raises(BadSample, match="the model takes 256"):
        train_share(made, random_samples(0, longest=600), 0, 1)
    with pytest.raises(BadConfiguration, match=r"seqs \[1\] are in no minibatch"):
        made.train(random_samples(0, groups=2), minibatches=[[0]], version=0)
    with pytest.raises(BadConfiguration, match="budget"):
        Trainer(made.backend, Sft(), Schedule(), budget=0)


def test_warm_up_goes_by_optimizer_steps() -> None:
    schedule = Schedule(lr=1.0, warmup=4)
    assert [schedule.at(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert Schedule(lr=2.0).at(0) == 2.0
