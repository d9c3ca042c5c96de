from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.trainers.algorithms.base import Algorithm, Scores, Sums, TokenAlgorithm, Weights
from millrace.trainers.algorithms.names import PAIRS
from millrace.trainers.algorithms.normalisation import Reduce, alone
from millrace.trainers.algorithms.registry import algorithm, names, policy
from millrace.trainers.algorithms.sft import Sft
from millrace.trainers.backends.models.build import with_scalar_head
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.packing import MicroBatch
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration, BadSample
from millrace.trainers.learning import Report, Schedule, Trainer
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.state import State
from tests.support.samples import random_samples, small_state
from tests.support.steps import HELD, train_share


@dataclass(frozen=True)
class FormerGrpo(TokenAlgorithm):
    """Group mean and unbiased std with eps 1e-4, clip 0.2 / 0.28; decoupled: behaviour weight up to 2."""

    name = "grpo"
    measures = ("kept",)

    minibatches: int = 2
    decoupled: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        return ("proximal",) if self.decoupled else ()

    def weigh(
        self, samples: Sequence[Sample], oldest: int | None, scores: Scores | None = None, reduce: Reduce = alone
    ) -> Weights:
        groups: dict[str, dict[str, float]] = defaultdict(dict)
        for sample in sorted(samples, key=lambda s: (s.group, s.trajectory)):
            if sample.reward is not None and (oldest is None or (sample.versions[sample.mask != 0] >= oldest).any()):
                groups[sample.group][sample.trajectory] = sample.reward
        advantages: dict[str, float] = {}
        for rewards in groups.values():
            values = np.asarray(list(rewards.values()), np.float64)
            centred = values - values.mean()
            scaled = centred / (values.std(ddof=1) + 1e-4) if len(values) > 1 else centred * 0
            advantages |= dict(zip(rewards, scaled.tolist(), strict=True))
        out: Weights = {}
        for sample in samples:
            versions = sample.versions[sample.mask != 0]
            keep = np.ones(len(versions)) if oldest is None else versions >= oldest
            known = sample.trajectory in advantages
            out[sample] = {
                "advantages": np.full(len(versions), advantages.get(sample.trajectory, 0.0), np.float32),
                "keep": (keep * known).astype(np.float32),
            }
            if self.decoupled:
                assert scores is not None
                out[sample]["proximal"] = scores["proximal"][sample]
        return out

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        old, weight = batch.behaviour, torch.ones_like(batch.behaviour)
        if self.decoupled:
            old = batch.column("proximal")
            weight = torch.exp(old - batch.behaviour).clamp(max=2.0)
        ratio = torch.exp(logprobs - old)
        free = -batch.advantages * ratio
        clipped = -batch.advantages * ratio.clamp(1.0 - 0.2, 1.0 + 0.28)
        losses = weight * torch.maximum(free, clipped)
        return torch.where(batch.keep > 0, losses * batch.keep, 0.0).sum(), {"kept": batch.keep.sum()}


def trainer(algorithm: Algorithm, budget: int = 16384, state: State | None = None) -> Trainer:
    backend = TorchBackend(device="cpu")
    backend.form(0, 1, None, 30.0)
    made = Trainer(backend, algorithm, Schedule(1e-3), budget=budget, held=HELD)
    made.load(state or small_state())
    return made


def outcome(algorithm: Algorithm, samples: list[Sample], budget: int = 16384) -> tuple[Report, State]:
    made = trainer(algorithm, budget)
    report = train_share(made, samples, 0, 1)
    state = made.backend.gather()
    assert state is not None
    return report, state


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 200),
    st.randoms(),
    st.sampled_from([policy("grpo"), policy("decoupled")]),
)
@pytest.mark.slow
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
    made = trainer(policy("grpo"))
    report = train_share(made, silent, 0, 1, version=10, oldest=9)
    ages = [10 - int(v) for s in samples for v in s.versions[s.mask != 0]]
    masked = sum(1 for s in silent for m, v in zip(s.mask, s.versions, strict=True) if m and v < 9)
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
    made = trainer(policy("grpo"))
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
    report, state = outcome(policy("grpo"), samples)
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


@pytest.mark.parametrize(("name", "decoupled"), [("grpo", False), ("decoupled", True)])
def test_the_default_is_bit_for_bit_what_it_was(name: str, decoupled: bool) -> None:
    """Against GRPO in one piece: several versions, stale tokens masked, a trajectory without a reward."""
    prints = []
    for kind in (policy(name), FormerGrpo(decoupled=decoupled)):
        made = trainer(kind, budget=100)
        for version in range(3):
            samples = random_samples(version, version=version)
            silent = [replace(s, reward=None) if s.trajectory == "0.1" else s for s in samples]
            train_share(made, silent, 0, 1, version=version, oldest=version - 1)
        state = made.backend.gather()
        assert state is not None
        prints.append(checkpoint.fingerprint(state))
    assert prints[0] == prints[1]


def preferred(seed: int) -> list[Sample]:
    """Pairs: the first of two is chosen."""
    samples = random_samples(seed, group_size=2)
    return [replace(s, reward=float(s.trajectory.endswith(".0"))) for s in samples]


@pytest.mark.parametrize("name", names())
def test_every_algorithm_trains(name: str) -> None:
    """Two steps of each by name; what it measures is finite, and the same state comes out again."""
    scalar = name == "reward-model"
    begin = with_scalar_head(small_state()) if scalar else small_state()
    prints = set()
    for _ in range(2):
        made = trainer(algorithm(name), state=begin)
        for version in range(2):
            samples = preferred(version) if name in PAIRS else random_samples(version)
            report = train_share(made, samples, 0, 1, version)
        assert report.unchanged is None
        assert all(math.isfinite(value) for value in report.metrics.values())
        assert report.metrics["grad_norm"] > 0
        state = made.backend.gather()
        assert state is not None
        assert (state.critic is not None) == (name == "ppo")
        prints.add(checkpoint.fingerprint(state))
    assert len(prints) == 1


def test_a_model_to_compare_with_must_be_named() -> None:
    with pytest.raises(BadConfiguration, match="name the model to hold as reference"):
        Trainer(TorchBackend(device="cpu"), algorithm("dpo"), Schedule())


def test_dynamic_sampling_trains_on_what_is_left() -> None:
    """Groups of equal rewards are counted nowhere: the step is that of the others alone."""
    samples = [replace(s, reward=1.0) if s.seq in (0, 4) else s for s in random_samples(0)]
    _, filtered = outcome(policy("dapo", minibatches=1), samples)
    _, others = outcome(policy("dapo", minibatches=1), [s for s in samples if s.seq not in (0, 4)])
    assert checkpoint.fingerprint(filtered) == checkpoint.fingerprint(others)


@pytest.mark.parametrize("name", ["dapo", "grpo", "ppo"])
def test_a_step_with_cut_off_replies_masked_is_that_of_the_others_alone(name: str) -> None:
    samples = [replace(s, truncated=s.trajectory in ("0.1", "2.0", "2.3")) for s in random_samples(0)]
    kind = policy(name, minibatches=1, mask_truncated=True)
    report, state = outcome(kind, samples)
    others, alone = outcome(kind, [s for s in samples if not s.truncated])
    assert checkpoint.fingerprint(state) == checkpoint.fingerprint(alone)
    assert report.metrics["loss"] == others.metrics["loss"]
    assert report.metrics["samples"] == others.metrics["samples"] + 3, "they came, and trained nothing"
    nothing, _ = outcome(kind, [replace(s, truncated=True) for s in samples])
    assert nothing.unchanged == "nothing trainable in the batch"


def test_masked_tokens_are_those_that_are_too_old_whatever_else_is_left_out() -> None:
    samples = [
        replace(s, truncated=s.seq == 1, reward=1.0 if s.seq == 2 else s.reward) for s in random_samples(0, version=5)
    ]
    report = train_share(trainer(policy("dapo", mask_truncated=True)), samples, 0, 1, version=5, oldest=5)
    assert report.masked_tokens == sum(int((s.versions[s.mask != 0] < 5).sum()) for s in samples)


def test_a_critic_learns_and_continues_from_its_checkpoint(tmp_path: Path) -> None:
    unbroken = trainer(policy("ppo"))
    resumed = small_state()
    losses = []
    for version in range(4):
        samples = random_samples(version % 2, version=version)
        report = train_share(unbroken, samples, 0, 1, version)
        losses.append(report.metrics["value_loss"])
        made = trainer(policy("ppo"), state=resumed)
        assert train_share(made, samples, 0, 1, version).metrics["value_loss"] == losses[-1]
        state = made.backend.gather()
        assert state is not None
        resumed = checkpoint.read(checkpoint.write(tmp_path, version, state).path)
        assert resumed.critic is not None
        assert resumed.critic.step == resumed.step == 2 * (version + 1)
    last = unbroken.backend.gather()
    assert last is not None
    assert checkpoint.fingerprint(last) == checkpoint.fingerprint(resumed)
    assert losses[2] < losses[0], "values come nearer to the returns of the same batch"


@pytest.mark.parametrize("aggregation", ["sequence", "constant"])
def test_a_critic_s_mean_is_over_tokens_however_the_policy_counts(aggregation: str) -> None:
    by_token, _ = outcome(policy("ppo", minibatches=1), random_samples(0))
    other, _ = outcome(policy("ppo", minibatches=1, aggregation=aggregation), random_samples(0))
    for name in ("value_loss", "value_grad_norm"):
        assert other.metrics[name] == by_token.metrics[name]
    assert other.metrics["loss"] != by_token.metrics["loss"]


def test_an_algorithm_without_a_critic_drops_it(tmp_path: Path) -> None:
    _, state = outcome(policy("ppo"), random_samples(0))
    assert state.critic is not None
    assert outcome_of(policy("grpo"), state).critic is None


def outcome_of(algorithm: Algorithm, state: State) -> State:
    made = trainer(algorithm, state=state)
    train_share(made, random_samples(1), 0, 1)
    after = made.backend.gather()
    assert after is not None
    return after


@pytest.mark.parametrize("name", ["grpo", "ppo", "gspo", "decoupled", "dpo"])
@pytest.mark.parametrize(
    "how",
    [{"packing": "ffd"}, {"packing": "kk"}, {"prefix_sharing": True}, {"prefix_sharing": True, "packing": "kk"}],
    ids=str,
)
def test_how_micro_batches_are_filled_does_not_matter(name: str, how: dict[str, Any]) -> None:
    """Groups of one prompt; a critic, sequence ratios, scores and pairs among what is compared."""
    samples = []
    for sample in preferred(0):
        tokens = sample.tokens.copy()
        tokens[:6] = np.arange(6)[: len(tokens)] + sample.seq
        samples.append(replace(sample, tokens=tokens))
    outcomes = []
    for settings_ in ({}, how):
        made = trainer(algorithm(name), budget=60)
        made = Trainer(made.backend, made.algorithm, Schedule(1e-3), budget=60, held=HELD, **settings_)
        made.load(small_state())
        outcomes.append((train_share(made, samples, 0, 1), made.backend.gather()))
    (plain, before), (other, after) = outcomes
    assert other.metrics["loss"] == pytest.approx(plain.metrics["loss"], abs=3e-6)
    assert other.metrics["grad_norm"] == pytest.approx(plain.metrics["grad_norm"], rel=1e-5)
    if "prefix_sharing" in how:
        ratio = other.metrics["tokens_computed"] / plain.metrics["tokens_computed"]
        assert other.metrics["tree_token_ratio"] == pytest.approx(ratio)
        assert ratio < 0.95
    assert before is not None
    assert after is not None
    for key, weight in before.weights.items():
        torch.testing.assert_close(after.weights[key], weight, rtol=0, atol=1e-4)


def test_what_a_backend_cannot_pack_is_refused() -> None:
    backend = TorchBackend(device="cpu")
    with pytest.raises(BadConfiguration, match="choose one of sequential, ffd, kk"):
        Trainer(backend, Sft(), Schedule(), packing="best")
    backend.shares_prefixes = False
    with pytest.raises(BadConfiguration, match="leave prefix_sharing out"):
        Trainer(backend, Sft(), Schedule(), prefix_sharing=True)


@pytest.mark.parametrize(("equal", "pulls"), [(True, False), (False, True)])
def test_a_batch_of_equal_rewards_says_that_it_teaches_nothing(
    equal: bool, pulls: bool, caplog: pytest.LogCaptureFixture
) -> None:
    samples = [replace(sample, reward=1.0) if equal else sample for sample in random_samples(0)]
    with caplog.at_level("WARNING", "millrace.learning"):
        report, _ = outcome(policy("grpo"), samples)
    assert (report.metrics["tokens_pulling"] > 0) is pulls
    assert ("teaches nothing" in caplog.text) is not pulls


def test_what_learns_from_more_than_advantages_counts_none_of_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "millrace.learning"):
        report, _ = outcome(Sft(), random_samples(0))
    assert "tokens_pulling" not in report.metrics
    assert "teaches nothing" not in caplog.text
