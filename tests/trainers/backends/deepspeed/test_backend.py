"""DeepSpeed's stages: the torch backend's numbers, skipped steps, states that pass between the two."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import Store

from millrace.trainers.algorithms.base import Algorithm, Sums
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.algorithms.sft import Sft
from millrace.trainers.backends.base import Adam
from millrace.trainers.backends.deepspeed.backend import DeepSpeedBackend
from millrace.trainers.backends.factory import make_backend
from millrace.trainers.backends.layout import REFERENCE, REWARD_MODEL, Layout
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.packing import MicroBatch, pack
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration, CheckpointError, NotFormed
from millrace.trainers.learning import Report, Schedule, Trainer
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.state import State
from tests.support.ranks import Ranks, descriptors, gloo_threads, meet
from tests.support.samples import random_samples, small_state
from tests.support.steps import HELD, reward_model, train_share

ADAM = Adam(weight_decay=0.01, clip=0.3)
LONG = 200.0
"""Seconds that a rank waits for another on a busy machine."""
Options = Mapping[str, Any]


def zero(options: Options) -> DeepSpeedBackend:
    """DeepSpeed on the CPU with the optimizer of these tests."""
    return DeepSpeedBackend(ADAM, device="cpu", **options)


def train(
    _: Any,
    rank: int,
    world: int,
    store: Store,
    options: Options,
    state: State,
    algorithm: Algorithm,
    batches: Sequence[Sequence[Sample]],
    budget: int,
) -> tuple[list[Report], State | None]:
    """Form, load, train each batch, gather, tear down."""
    backend = zero(options)
    meet(rank, world, store, "forming")
    backend.form(rank, world, store, LONG)
    try:
        trainer = Trainer(backend, algorithm, Schedule(1e-3), budget=budget, held=HELD)
        trainer.load(state)
        reports = [train_share(trainer, batch, rank, world, version) for version, batch in enumerate(batches)]
        return reports, backend.gather()
    finally:
        backend.tear_down()


class SickOn(Sft):
    """SFT whose loss is infinite on one rank alone, with a gradient that is none the worse for it."""

    def __init__(self, sick: bool) -> None:
        super().__init__()
        object.__setattr__(self, "sick", sick)

    def loss(self, logprobs: Any, entropy: Any, batch: MicroBatch) -> tuple[Any, Sums]:
        loss, sums = super().loss(logprobs, entropy, batch)
        return (loss + float("inf") if self.sick else loss), sums


def skip(
    _: Any, rank: int, world: int, store: Store, options: Options, state: State
) -> tuple[State | None, Report, State | None, State | None]:
    """The state after a good step, the report and the state of one that is non-finite on the last rank alone, the
    state after a good one that follows."""
    backend = zero(options)
    meet(rank, world, store, "forming")
    backend.form(rank, world, store, LONG)
    backend.load(state)

    def trained(algorithm: Algorithm, seed: int) -> tuple[Report, State | None]:
        trainer = Trainer(backend, algorithm, Schedule(1e-3), budget=60)
        return train_share(trainer, random_samples(seed), rank, world), backend.gather()

    try:
        _, before = trained(Sft(), 0)
        report, after = trained(SickOn(rank == world - 1), 1)
        _, later = trained(Sft(), 2)
    finally:
        backend.tear_down()
    return before, report, after, later


def form_again(
    _: Any, rank: int, world: int, store: Store, options: Options, state: State, times: int
) -> list[tuple[int, int]]:
    """Form, load, use and tear down in one process; open descriptors and gloo's threads after each group."""
    backend, seen = zero(options), []
    meet(rank, world, store, "forming")
    for index in range(times):
        backend.form(rank, world, dist.PrefixStore(str(index), store), LONG)
        backend.load(state)
        assert backend.sum([1.0, float(rank)]) == [world, world * (world - 1) / 2]
        train_share(Trainer(backend, Sft(), Schedule(5e-4)), random_samples(index), rank, world)
        backend.gather()
        backend.tear_down()
        seen.append((descriptors(), gloo_threads()))
    return seen


pytestmark = pytest.mark.slow

LOSS, NORM, WEIGHT = 1.5e-6, 1e-6, 5e-5
BUDGET = 60
"""Tokens a micro-batch: several a step."""
Options = dict[str, Any]


def alone(state: State, algorithm: Algorithm, seeds: range) -> tuple[list[Report], State]:
    """What one process of the torch backend makes of it."""
    backend = TorchBackend(ADAM, device="cpu")
    backend.form(0, 1, None, 60.0)
    trainer = Trainer(backend, algorithm, Schedule(1e-3), budget=BUDGET, held=HELD)
    trainer.load(state)
    reports = [train_share(trainer, random_samples(seed), 0, 1, index) for index, seed in enumerate(seeds)]
    gathered = backend.gather()
    assert gathered is not None
    return reports, gathered


def together(
    ranks: Ranks, options: Options, state: State, algorithm: Algorithm, seeds: range, world: int = 2
) -> tuple[list[Report], State]:
    data = [random_samples(seed) for seed in seeds]
    results = ranks.run(train, world, options, state, algorithm, data, BUDGET)
    assert all(gathered is None for _, gathered in results[1:])
    return results[0]


def assert_same_state(ours: State, theirs: State) -> None:
    assert ours.step == theirs.step
    for name, weight in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=0, atol=WEIGHT)
    assert ours.moments.keys() == theirs.moments.keys()
    for slot, moments in theirs.moments.items():
        for name, moment in moments.items():
            torch.testing.assert_close(ours.moments[slot][name], moment, rtol=1e-3, atol=1e-6)
    assert (ours.critic is None) == (theirs.critic is None)
    if ours.critic is not None and theirs.critic is not None:
        assert_same_state(ours.critic, theirs.critic)


def assert_same_reports(ours: list[Report], theirs: list[Report]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=LOSS)
        assert mine.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=NORM)
        assert other.metrics["grad_norm"] > ADAM.clip, "the clip is at work"
        for name in {"value_loss", "value_grad_norm"} & other.metrics.keys():
            assert mine.metrics[name] == pytest.approx(other.metrics[name], rel=5e-6)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"stage": 0}, "ppo"),
        ({"stage": 1}, "grpo"),
        ({"stage": 2}, "ppo"),
        ({"stage": 3}, "ppo"),
        ({"stage": 1, "offload": True}, "grpo"),
        ({"stage": 2, "offload": True}, "grpo"),
        ({"stage": 3, "offload": True}, "decoupled"),
    ],
)
def test_a_stage_equals_one_process_of_torch(ranks: Ranks, options: Options, name: str) -> None:
    """PPO has a critic, which is a second engine; decoupled scores before it steps."""
    state = small_state("qwen3")
    ours = together(ranks, options, state, policy(name), range(2))
    theirs = alone(state, policy(name), range(2))
    assert_same_reports(ours[0], theirs[0])
    assert_same_state(ours[1], theirs[1])


@pytest.mark.parametrize("stage", range(4))
def test_a_run_crosses_between_backends(ranks: Ranks, stage: int) -> None:
    """torch, DeepSpeed on 2 ranks, DeepSpeed alone or on 3, torch: as torch throughout."""
    algorithm = policy("grpo")
    unbroken = alone(small_state(), algorithm, range(4))[1]
    state = alone(small_state(), algorithm, range(1))[1]
    state = together(ranks, {"stage": stage}, state, algorithm, range(1, 2))[1]
    state = together(ranks, {"stage": stage}, state, algorithm, range(2, 3), world=3)[1]
    state = alone(state, algorithm, range(3, 4))[1]
    assert_same_state(state, unbroken)


def test_ranks_of_different_pasts_agree() -> None:
    """Two that ran stage 3 before, and one that did not, in stages that trust all ranks to order gradients alike."""
    with Ranks(3) as fresh:
        data = [random_samples(0)]
        fresh.run(train, 2, {"stage": 3}, small_state("qwen3"), policy("grpo"), data, BUDGET)
        theirs = alone(small_state(), policy("grpo"), range(1))
        for stage in (2, 3):
            ours = together(fresh, {"stage": stage}, small_state(), policy("grpo"), range(1), world=3)
            assert_same_reports(ours[0], theirs[0])
            assert_same_state(ours[1], theirs[1])


def assert_skipped(results: list[Any]) -> None:
    before, report, after, later = results[0]
    assert checkpoint.fingerprint(after) == checkpoint.fingerprint(before)
    assert later.step == before.step + 1
    assert all(torch.isfinite(weight).all() for weight in later.weights.values())
    for _, other, *_ in results:
        assert other.unchanged == "non-finite loss or gradient"
    assert report.metrics["steps_skipped"] == 1


@pytest.mark.parametrize(
    "options", [*({"stage": stage} for stage in range(4)), {"stage": 2, "offload": True}, {"stage": 3, "bf16": True}]
)
def test_a_non_finite_step_changes_no_byte(options: Options) -> None:
    assert_skipped([skip(None, 0, 1, HashStore(), options, small_state())])


def test_a_step_that_is_non_finite_on_one_rank_is_skipped_on_all(ranks: Ranks) -> None:
    assert_skipped(ranks.run(skip, 2, {"stage": 1}, small_state()))


@pytest.fixture(scope="module")
def alone_in_it() -> Iterator[Ranks]:
    """A process that has no groups of other tests."""
    with Ranks(1) as pool:
        yield pool


@pytest.mark.parametrize("stage", range(4))
def test_groups_come_and_go_in_one_process(stage: int, alone_in_it: Ranks) -> None:
    """Nothing of a group survives it: neither threads nor descriptors."""
    (seen,) = alone_in_it.run(form_again, 1, {"stage": stage}, small_state(), 3)
    assert {threads for _, threads in seen} == {0}
    assert seen[-1][0] <= seen[1][0], f"descriptors leak: {seen}"


@pytest.mark.parametrize("stage", [2, 3])
def test_bf16_keeps_fp32_weights(stage: int) -> None:
    """What is loaded comes back to the last bit, though the model computes in bf16."""
    state = small_state("qwen3")
    (theirs,), _ = alone(state, policy("grpo"), range(1))
    backend = formed(state, stage=stage, bf16=True)
    gathered = backend.gather()
    assert gathered is not None
    assert checkpoint.fingerprint(gathered) == checkpoint.fingerprint(state)
    report = train_share(Trainer(backend, policy("grpo"), Schedule(1e-3)), random_samples(0), 0, 1)
    assert report.metrics["loss"] == pytest.approx(theirs.metrics["loss"], abs=2e-2)
    assert report.metrics["grad_norm"] == pytest.approx(theirs.metrics["grad_norm"], rel=5e-2)
    backend.tear_down()


def formed(state: State, **options: Any) -> DeepSpeedBackend:
    backend = DeepSpeedBackend(ADAM, device="cpu", **options)
    backend.form(0, 1, None, 60.0)
    backend.load(state)
    return backend


def test_frozen_models_score_and_do_not_learn() -> None:
    state, frozen = small_state(), small_state(seed=5)
    micro = pack(random_samples(0))
    backend = formed(state)
    backend.hold(REFERENCE, frozen)
    plain = TorchBackend(device="cpu")
    plain.form(0, 1, None, 60.0)
    plain.load(frozen)
    torch.testing.assert_close(backend.score([micro], 1.0, REFERENCE), plain.score([micro], 1.0), rtol=0, atol=1e-6)
    with pytest.raises(NotFormed, match="frozen"):
        backend.step([micro], Sft(), 1.0, 1e-3, REFERENCE)
    backend.tear_down()


def test_a_reward_model_says_what_it_says_elsewhere() -> None:
    micro = pack(random_samples(0))
    backend = formed(small_state())
    backend.hold(REWARD_MODEL, reward_model())
    plain = TorchBackend(device="cpu")
    plain.form(0, 1, None, 60.0)
    plain.load(small_state())
    plain.hold(REWARD_MODEL, reward_model())
    ours, theirs = (of.values([micro], REWARD_MODEL) for of in (backend, plain))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    backend.tear_down()


def test_use_before_form_and_load_is_refused() -> None:
    backend = DeepSpeedBackend(device="cpu")
    with pytest.raises(NotFormed, match="form, then load"):
        backend.gather()
    with pytest.raises(NotFormed, match="form, then load"):
        backend.load(small_state())
    backend.form(0, 1, None, 60.0)
    with pytest.raises(NotFormed, match="form, then load"):
        backend.step([], Sft(), 1.0, 1e-3)
    backend.load(small_state())
    backend.tear_down()
    backend.tear_down()
    backend.abort()
    with pytest.raises(NotFormed):
        backend.vocabulary  # noqa: B018


def test_weights_of_another_model_are_refused_when_they_are_loaded() -> None:
    small, other = small_state(), small_state(hidden_size=64)
    backend = DeepSpeedBackend(device="cpu")
    backend.form(0, 1, None, 60.0)
    with pytest.raises(CheckpointError, match=r"in config\.json"):
        backend.load(State(other.weights, small.assets))
    backend.tear_down()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"stage": 4}, "stages 0 to 3"),
        ({"stage": 0, "offload": True}, "from stage 1 on"),
        ({"stage": 1, "bf16": True}, "bf16 needs ZeRO 2 or 3"),
        ({"parallel": Layout(d=2)}, "no layout of DeepSpeed"),
        ({"parallel": Layout("deepspeed", t=2)}, "no dimension t"),
    ],
)
def test_what_cannot_be_is_refused(options: Options, why: str) -> None:
    with pytest.raises(BadConfiguration, match=why):
        DeepSpeedBackend(device="cpu", **options)


def test_its_layout_names_it() -> None:
    backend = make_backend("deepspeed:d2", ADAM, stage=3, device="cpu")
    assert isinstance(backend, DeepSpeedBackend)
    assert backend.zero.stage == 3


def test_without_deepspeed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(BadConfiguration, match="DeepSpeed is not installed: run `make setup`"):
        DeepSpeedBackend(device="cpu")
