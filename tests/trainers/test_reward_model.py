"""A reward model that scores samples at the learner: what it says is what transformers says, and no cut changes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification

from millrace.trainers.algorithms import rewards
from millrace.trainers.algorithms.policy import PolicyGradient
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.backends.models.build import with_scalar_head
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.packing import ADVANTAGES, KEEP, REWARD_MODEL, pack
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration
from millrace.trainers.learning import Report, Schedule, Trainer
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.state import State
from tests.support.ranks import Ranks
from tests.support.samples import random_samples, small_state
from tests.support.steps import HELD, reward_model, train, train_share

ALONE = policy("grpo", reward_model_coef=1.0, recorded_coef=0.0, minibatches=1)
MIXED = policy("grpo", reward_model_coef=0.3, recorded_coef=2.0, minibatches=1)


def trainer_of(algorithm: PolicyGradient, **options: Any) -> Trainer:
    made = Trainer(TorchBackend(device="cpu"), algorithm, Schedule(1e-3), held=HELD, **options)
    made.backend.form(0, 1, None, 30.0)
    made.load(small_state())
    return made


def said(sample: Sample, model: Any) -> float:
    """What transformers' own model says of one sample."""
    with torch.no_grad():
        return float(model(input_ids=torch.from_numpy(sample.tokens.astype(np.int64))[None]).logits[0, 0])


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The reward model as transformers loads it from its directory."""
    path = tmp_path_factory.mktemp("judge")
    checkpoint.export(path, reward_model())
    return AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, pad_token_id=0).eval()


def by_hand(samples: list[Sample], judge: Any) -> dict[tuple[str, str], float]:
    marks: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        marks.setdefault((sample.group, sample.trajectory), []).append(said(sample, judge))
    return {key: sum(found) / len(found) for key, found in marks.items()}


def test_scores_are_those_of_transformers(judge: Any) -> None:
    samples = random_samples(3)
    trainer = trainer_of(ALONE, budget=70)
    report = train_share(trainer, samples, 0, 1)
    expected = by_hand(samples, judge)
    assert len({round(mark, 3) for mark in expected.values()}) > 10, "they differ"
    assert report.metrics["reward_model_mean"] == pytest.approx(np.mean([*expected.values()]), abs=1e-5)
    assert report.metrics["reward_used_mean"] == report.metrics["reward_model_mean"]
    assert report.metrics["samples_without_score"] == 0
    packed = pack(samples)
    (values,) = trainer.backend.values([packed], REWARD_MODEL)
    for sample, end in zip(packed.members, packed.ends, strict=True):
        assert float(values[end]) == pytest.approx(said(sample, judge), abs=1e-5)


def test_it_trains_as_if_the_scores_had_been_recorded(judge: Any) -> None:
    samples = random_samples(3)
    marks = by_hand(samples, judge)
    told = [replace(s, reward=2.0 * (s.reward or 0.0) + 0.3 * marks[s.group, s.trajectory]) for s in samples]
    ours, theirs = trainer_of(MIXED), trainer_of(policy("grpo", minibatches=1))
    mine, other = train_share(ours, samples, 0, 1), train_share(theirs, told, 0, 1)
    assert mine.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=1e-5)
    assert mine.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=1e-4)
    assert mine.metrics["reward_used_mean"] == pytest.approx(other.metrics["reward_mean"], abs=1e-5)
    recorded = [s.reward for s in {s.trajectory: s for s in samples}.values() if s.reward is not None]
    assert mine.metrics["reward_mean"] == pytest.approx(np.mean(recorded))


def sample(name: str, reward: float | None, lineage: int = 0) -> Sample:
    return replace(random_samples(0, groups=1, group_size=1)[0], trajectory=name, reward=reward, lineage=lineage)


def test_what_a_missing_part_means() -> None:
    known, unknown, unscored = sample("a", 1.0), sample("b", None), sample("c", 1.0)
    more = sample("a", 1.0, 1)
    one = {s: np.array([v], np.float32) for s, v in ((known, 3.0), (more, 5.0), (unknown, 1.0))}
    scores = {**one, unscored: np.array([np.nan], np.float32)}
    samples = [unscored, unknown, more, known]
    group = known.group
    assert rewards.model_scores(samples, scores) == {(group, "a"): 4.0, (group, "b"): 1.0}
    both = rewards.mix_rewards(samples, scores, recorded_coef=0.5, reward_model_coef=2.0)
    assert both == {(group, "a"): 8.5}
    alone = rewards.mix_rewards(samples, scores, recorded_coef=0.0, reward_model_coef=2.0)
    assert alone == {(group, "a"): 8.0, (group, "b"): 2.0}
    nothing = np.zeros(0, np.float32)
    assert rewards.model_scores([known, more], {known: nothing, more: nothing}) == {}


def test_a_score_that_is_no_number_takes_no_part() -> None:
    samples = random_samples(0, groups=2, group_size=2)
    scores = {s: np.array([np.inf if s.trajectory == "0.0" else 1.0], np.float32) for s in samples}
    weights = ALONE.weigh(samples, None, {REWARD_MODEL: scores})
    for one in samples:
        assert bool(weights[one][KEEP].any()) == (one.trajectory != "0.0")
        assert np.isfinite(weights[one][ADVANTAGES]).all()


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    world=st.integers(1, 3),
    budget=st.sampled_from([30, 100, 10**6]),
    filling=st.sampled_from([{}, {"packing": "kk"}, {"prefix_sharing": True}]),
    seed=st.integers(0, 5),
)
def test_cuts_do_not_matter(ranks: Ranks, world: int, budget: int, filling: dict[str, Any], seed: int) -> None:
    data = [random_samples(seed, groups=5, group_size=3)]
    whole: list[tuple[list[Report], Any]] = ranks.run(train, 1, small_state(), MIXED, data)
    parts: list[tuple[list[Report], Any]] = ranks.run(train, world, small_state(), MIXED, data, budget, filling)
    names = ("reward_model_mean", "reward_used_mean", "samples_without_score", "reward_mean")
    expected = whole[0][0][0].metrics
    for reports, _ in parts:
        found = reports[0].metrics
        assert [found[name] for name in names] == pytest.approx([expected[name] for name in names], abs=1e-6)
        assert found["loss"] == pytest.approx(expected["loss"], abs=2e-6)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-5)
    for name, weight in whole[0][1].weights.items():
        torch.testing.assert_close(parts[0][1].weights[name], weight, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("algorithm", "held", "message"),
    [
        (ALONE, {REWARD_MODEL: small_state}, "the reward model has a vocabulary and no score"),
        (
            ALONE,
            {REWARD_MODEL: lambda: with_scalar_head(small_state(vocab_size=32))},
            "the reward_model knows 32 tokens, the policy 64",
        ),
        (policy("grpo", kl_coef=0.1), {"reference": reward_model}, "the reference has a score instead"),
    ],
)
def test_models_that_cannot_score_are_refused(
    algorithm: PolicyGradient, held: dict[str, Callable[[], State]], message: str
) -> None:
    made = Trainer(TorchBackend(device="cpu"), algorithm, Schedule(5e-4), held=held)
    made.backend.form(0, 1, None, 30.0)
    with pytest.raises(BadConfiguration, match=message):
        made.load(small_state())


def test_a_reward_model_must_be_named() -> None:
    with pytest.raises(BadConfiguration, match="name the model to hold as reward_model"):
        Trainer(TorchBackend(device="cpu"), ALONE, Schedule(5e-4))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"recorded_coef": 0.5}, "set reward_model_coef above 0"),
        ({"reward_model_coef": -1.0}, "must be 0 or more"),
        ({"reward_model_coef": 1.0, "dynamic_sampling": True}, "set dynamic_sampling = false"),
    ],
)
def test_knobs_that_contradict_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfiguration, match=message):
        policy("grpo", **knobs)


def test_the_mean_is_exact() -> None:
    samples = [sample(str(i), None) for i in range(3)]
    scores = {s: np.array([v], np.float32) for s, v in zip(samples, (1e8, 1.0, -1e8), strict=True)}
    assert math.fsum(rewards.model_scores(samples, scores).values()) == 1.0
