"""What cannot be trained on ends in a clear error or in a skip that the report counts, never in a silent wrong
number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.algorithms.registry import algorithm, policy
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.sample import Sample
from millrace.trainers.compatibility import suits
from millrace.trainers.errors import BadConfiguration, BadSample, CheckpointError
from millrace.trainers.learning import Report, Schedule, Trainer
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.state import State
from tests.support.samples import random_samples, small_state
from tests.support.steps import train_share

Change = Callable[[list[Sample]], list[Sample]]


def trainer(of: Algorithm, state: State | None = None, held: dict[str, Any] | None = None) -> Trainer:
    backend = TorchBackend(device="cpu")
    backend.form(0, 1, None, 30.0)
    made = Trainer(backend, of, Schedule(1e-3), held=held)
    made.load(state or small_state())
    return made


def first(samples: list[Sample], **changes: Any) -> list[Sample]:
    return [replace(samples[0], **changes), *samples[1:]]


def long(samples: list[Sample]) -> list[Sample]:
    zeros = np.zeros(257)
    arrays = {"tokens": zeros.astype(np.int32), "mask": zeros.astype(np.uint8), "logprobs": zeros.astype(np.float32)}
    return first(samples, **arrays, versions=zeros.astype(np.int32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: first(s, reward=float("nan")), "a reward of nan; give None where there is none"),
        (lambda s: first(s, reward=float("-inf")), "a reward of -inf"),
        (lambda s: first(s, tokens=s[0].tokens + 64), "token id outside"),
        (lambda s: first(s, tokens=s[0].tokens - 64), "token id outside"),
        (lambda s: first(s, logprobs=s[0].logprobs * np.float32("nan")), "no finite behaviour log-probability"),
        (lambda s: first(s, mask=s[0].mask | np.uint8(1)), "nothing predicts it"),
        (lambda s: first(s, versions=s[0].versions[1:]), "arrays of different lengths"),
        (long, "257 tokens, the model takes 256; lower the engine's limit"),
    ],
    ids=["NaN reward", "infinite reward", "large id", "negative id", "log-probability", "first", "lengths", "limit"],
)
def test_an_impossible_sample_is_refused_before_any_step(change: Change, message: str) -> None:
    made = trainer(policy("grpo"))
    with pytest.raises(BadSample, match=message):
        train_share(made, change(random_samples(0)), 0, 1)
    assert made.backend.steps == 0


def masked(samples: list[Sample]) -> list[Sample]:
    return [replace(s, mask=s.mask * 0) if s.seq == 0 else s for s in samples]


@pytest.mark.parametrize("name", ["grpo", "ppo", "rloo", "reinforce++-baseline", "dapo", "gspo", "sft", "decoupled"])
def test_a_group_of_masked_samples_counts_for_nothing(name: str) -> None:
    """It trains as if it were not there, where no statistic spans groups; everywhere it trains on."""
    knobs = {"kl_coef": 0.0} if name == "reinforce++-baseline" else {}
    one = algorithm(name, minibatches=1, **knobs)
    samples = masked(random_samples(0))
    report = train_share(trainer(one), samples, 0, 1)
    assert report.unchanged is None
    assert report.metrics["tokens_trainable"] == sum(s.trainable for s in samples if s.seq)
    if name in ("grpo", "sft", "decoupled"):
        others = train_share(trainer(one), [s for s in samples if s.seq], 0, 1)
        assert report.metrics["loss"] == others.metrics["loss"]
        assert report.metrics["grad_norm"] == others.metrics["grad_norm"]


@pytest.mark.parametrize("name", ["grpo", "ppo", "rloo", "reinforce++", "dapo", "gspo", "cispo", "decoupled"])
def test_a_batch_without_rewards_pulls_nowhere(name: str) -> None:
    knobs = {"kl_coef": 0.0} if name == "reinforce++" else {}
    samples = [replace(s, reward=None) for s in random_samples(0)]
    begin = small_state()
    made = trainer(algorithm(name, **knobs), begin)
    report = train_share(made, samples, 0, 1)
    state = made.backend.gather()
    assert state is not None
    assert report.metrics["samples_without_reward"] == len({s.trajectory for s in samples})
    assert report.metrics["reward_mean"] == 0
    assert report.metrics.get("grad_norm", 0.0) == 0
    for key, weight in state.weights.items():
        assert weight.equal(begin.weights[key])


def test_an_empty_batch_and_empty_groups_are_said() -> None:
    made = trainer(policy("grpo"))
    assert made.train([], minibatches=[[0], [1]], version=0).unchanged == "nothing trainable in the batch"
    report = made.train(random_samples(0, groups=1), minibatches=[[0], [1]], version=0)
    assert (report.metrics["steps"], report.metrics["steps_skipped"], report.unchanged) == (1, 0, None)


def test_an_overflowing_ratio_skips_the_step_and_is_counted() -> None:
    """Behaviour log-probabilities that are finite and absurd: exp of the difference is infinite."""
    samples = [replace(s, logprobs=np.where(s.mask, -1e4, 0).astype(np.float32)) for s in random_samples(0)]
    made = trainer(policy("grpo"))
    report: Report = train_share(made, samples, 0, 1)
    assert (report.metrics["steps"], report.metrics["steps_skipped"]) == (0, 2)
    assert report.unchanged == "non-finite loss or gradient"
    state = made.backend.gather()
    assert state is not None
    assert checkpoint.fingerprint(state) == checkpoint.fingerprint(small_state())
    assert train_share(made, random_samples(0), 0, 1).metrics["steps"] == 2, "training goes on"


@pytest.mark.parametrize(
    ("name", "role", "vocabulary", "refused"),
    [
        ("dpo", "reference", 32, True),
        ("dpo", "reference", 64, False),
        ("dpo", "reference", 80, False),
        ("distill-forward", "teacher", 32, True),
        ("distill-forward", "teacher", 80, True),
        ("distill-forward", "teacher", 64, False),
    ],
)
def test_a_model_of_another_vocabulary_is_refused(name: str, role: str, vocabulary: int, refused: bool) -> None:
    held = {role: lambda: small_state(seed=5, vocab_size=vocabulary)}
    if not refused:
        trainer(algorithm(name), held=held)
        return
    with pytest.raises(BadConfiguration, match=f"the {role} knows {vocabulary} tokens, the policy 64"):
        trainer(algorithm(name), held=held)


def trained(**settings: Any) -> State:
    made = trainer(policy("grpo"), small_state(**settings))
    train_share(made, random_samples(0), 0, 1)
    state = made.backend.gather()
    assert state is not None
    return state


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """Weights of one, and configuration or moments of another; each file whole by itself."""
    ours, theirs = trained(), trained(hidden_size=48)
    deeper = trained(num_hidden_layers=3)
    cases = {
        r"in config\.json": State(theirs.weights, ours.assets),
        r"do not fit .* missing": State(ours.weights, deeper.assets),
        "exp_avg does not fit the weights at": State(ours.weights, ours.assets, theirs.moments, ours.step),
        r"does not fit the weights at model\.layers\.2": State(ours.weights, ours.assets, deeper.moments, ours.step),
    }
    for version, (message, state) in enumerate(cases.items()):
        path = checkpoint.write(tmp_path, version, state).path
        with pytest.raises(CheckpointError, match=message):
            trainer(policy("grpo"), checkpoint.read(path))


def test_a_value_model_is_no_policy(tmp_path: Path) -> None:
    made = trainer(policy("ppo"))
    train_share(made, random_samples(0), 0, 1)
    state = made.backend.gather()
    assert state is not None
    assert state.critic is not None
    with pytest.raises(CheckpointError, match="missing"):
        trainer(policy("grpo"), replace(state, weights=state.critic.weights, moments={}))


def test_a_critic_that_learned_while_its_policy_could_not_is_a_change() -> None:
    made = trainer(policy("ppo"))
    far = [replace(s, logprobs=np.where(s.mask, -1e4, 0).astype(np.float32)) for s in random_samples(0)]
    before = made.backend.gather()
    report = train_share(made, far, 0, 1)
    after = made.backend.gather()
    assert (report.metrics["steps"], report.metrics["steps_skipped"]) == (0, 2)
    assert report.metrics["value_steps_skipped"] == 0
    assert report.unchanged is None
    assert before is not None
    assert after is not None
    assert (after.step, after.critic is not None and after.critic.step) == (0, 2)
    assert checkpoint.fingerprint(replace(after, critic=None)) == checkpoint.fingerprint(replace(before, critic=None))


@pytest.mark.parametrize(
    ("of", "size", "limit", "message"),
    [
        (policy("grpo"), 1, None, "reward_norm takes the mean of groups"),
        (policy("ppo", advantage_norm="group/none"), 1, None, "advantage_norm takes the mean of groups"),
        (policy("ppo", dynamic_sampling=True), 1, None, "leaves out groups of equals"),
        (policy("dapo"), 8, 1024, "max_new_tokens = 4096, and replies end at .* 1024"),
        (algorithm("dpo"), 8, None, "set .policy. group_size = 2"),
        (algorithm("reward-model"), 1, None, "set .policy. group_size = 2"),
    ],
    ids=["group mean", "group mean of tokens", "dynamic sampling", "limit", "dpo", "reward model"],
)
def test_an_algorithm_that_would_learn_nothing_is_refused(
    of: Algorithm, size: int, limit: int | None, message: str
) -> None:
    with pytest.raises(BadConfiguration, match=message):
        suits(of, size, limit)


def test_what_each_algorithm_compares_is_fine() -> None:
    for of, size, limit in ((policy("ppo"), 1, 64), (policy("dapo"), 8, 4096), (algorithm("dpo"), 2, None)):
        suits(of, size, limit)
