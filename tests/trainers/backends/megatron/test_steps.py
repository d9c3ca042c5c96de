"""Megatron on real processes, beyond the conformance suite: every kind of algorithm, tied embeddings, steps that are
skipped, bytes that repeat, groups that come and go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from millrace.trainers.algorithms.base import Algorithm, Sums
from millrace.trainers.algorithms.distill import Distill
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.algorithms.sft import Sft
from millrace.trainers.backends.base import Adam
from millrace.trainers.backends.factory import make_backend
from millrace.trainers.batches.packing import MicroBatch
from millrace.trainers.batches.sample import Sample
from millrace.trainers.learning import Report, Schedule, Trainer
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.state import State
from tests.support import megatron_shim
from tests.support.ranks import RankFailed, Ranks, descriptors, gloo_threads, meet
from tests.support.samples import random_samples, small_state
from tests.support.steps import HELD, train_share

pytestmark = pytest.mark.slow

ADAM = Adam(weight_decay=0.01, clip=0.1)
TIED = {"tie_word_embeddings": True, "vocab_size": 65}


@dataclass(frozen=True)
class Outcome:
    """reports of every batch; state of rank 0."""

    reports: list[Report]
    state: State | None


class Sick(Sft):
    """SFT whose loss is no number where the batch's first group is, so on one cell alone."""

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        loss, sums = super().loss(logprobs, entropy, batch)
        return (loss * torch.nan if any(sample.seq == 0 for sample in batch.members) else loss), sums


def learn(
    _: Any,
    rank: int,
    world: int,
    store: Store,
    layout: str,
    state: State,
    algorithm: Algorithm,
    batches: Sequence[Sequence[Sample]],
    sick: int | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Outcome:
    """A job: form, load, train each batch (`sick`: the index of one that is Sick), gather, tear down."""
    if layout.startswith("megatron"):
        megatron_shim.install()
    backend = make_backend(layout, ADAM, **options)
    meet(rank, world, store, "forming")
    backend.form(rank, world, store, 60.0)
    trainer = Trainer(backend, algorithm, Schedule(1e-3), budget=120, held=HELD)
    trainer.load(state)
    reports = []
    for index, batch in enumerate(batches):
        trainer.algorithm = Sick(minibatches=1) if index == sick else algorithm
        reports.append(train_share(trainer, batch, backend.data_rank, backend.data_world))
    gathered = backend.gather()
    backend.tear_down()
    return Outcome(reports, gathered)


def come_and_go(_: Any, rank: int, world: int, store: Store, layouts: Sequence[str]) -> list[tuple[int, int]]:
    """A job: one layout after the other in one process; descriptors and gloo's threads after each."""
    megatron_shim.install()
    seen = []
    for index, layout in enumerate(layouts):
        backend = make_backend(layout, ADAM)
        own = dist.PrefixStore(str(index), store)
        meet(rank, world, own, "forming")
        backend.form(rank, world, own, 60.0)
        trainer = Trainer(backend, policy("grpo"), Schedule(5e-4))
        trainer.load(small_state("qwen3"))
        train_share(trainer, random_samples(index), backend.data_rank, backend.data_world)
        backend.gather()
        backend.tear_down()
        backend.tear_down()
        assert not dist.is_initialized()
        seen.append((descriptors(), gloo_threads()))
    return seen


def wait_for_the_other(_: Any, rank: int, world: int, store: Store) -> str:
    """A job: the last rank leaves while rank 0 waits for it; says how the waiting ended."""
    megatron_shim.install()
    backend = make_backend("megatron:d1t2", ADAM)
    meet(rank, world, store, "forming")
    backend.form(rank, world, store, 60.0)
    backend.load(small_state("qwen3"))
    if rank == world - 1:
        backend.tear_down()
        return "left"
    try:
        backend.gather()
    except RuntimeError as error:
        return type(error).__name__
    finally:
        backend.tear_down()
    return "no end"


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(2) as made:
        yield made


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def run(pool: Ranks, layout: str, state: State, algorithm: Algorithm, batches: int = 2, **shape: Any) -> list[Outcome]:
    world = 1 if layout.endswith(":d1") else 2
    data = [random_samples(seed, **shape) for seed in range(batches)]
    return pool.run(learn, world, layout, state, algorithm, data)


def assert_close(ours: Outcome, theirs: Outcome) -> None:
    for mine, other in zip(ours.reports, theirs.reports, strict=True):
        assert mine.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=1.5e-6)
        assert mine.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=9e-7)
        assert mine.metrics["entropy"] == pytest.approx(other.metrics["entropy"], rel=1e-6)
        assert mine.masked_tokens == other.masked_tokens
        assert mine.metrics["tokens_computed"] == other.metrics["tokens_computed"]
        for name in {"value_loss", "value_grad_norm"} & mine.metrics.keys():
            assert mine.metrics[name] == pytest.approx(other.metrics[name], rel=5e-6)
    assert ours.state is not None
    assert theirs.state is not None
    pairs = [(ours.state, theirs.state)]
    if theirs.state.critic is not None:
        assert ours.state.critic is not None
        pairs.append((ours.state.critic, theirs.state.critic))
    for mine_state, their_state in pairs:
        assert mine_state.step == their_state.step
        assert mine_state.assets == their_state.assets
        assert mine_state.moments.keys() == their_state.moments.keys()
        for name, weight in their_state.weights.items():
            torch.testing.assert_close(mine_state.weights[name], weight, rtol=0, atol=5e-5)
            for slot, moments in their_state.moments.items():
                torch.testing.assert_close(mine_state.moments[slot][name], moments[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("layout", "algorithm", "settings"),
    [
        ("megatron:d1t2", policy("ppo"), {}),
        ("megatron:d1p2", policy("ppo"), {}),
        ("megatron:d1c2", policy("ppo"), {}),
        ("megatron:d1p2", policy("decoupled"), TIED),
        ("megatron:d1t2", Distill(), TIED),
        ("megatron:d1p2", Distill(), {}),
        ("megatron:d1t2", policy("grpo", reward_model_coef=0.5), {}),
        ("megatron:d1c2", Distill(), {}),
        ("megatron:d1c2", policy("gspo", recompute=True), {}),
        ("megatron:d2", policy("reinforce++-baseline", kl_coef=0.1), {}),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "name", "tied" if value else "untied"),
)
def test_every_kind_of_algorithm(pool: Ranks, layout: str, algorithm: Algorithm, settings: dict[str, Any]) -> None:
    state = small_state("qwen3", **settings)
    if isinstance(algorithm, Distill) and settings:
        state = small_state("qwen3", tie_word_embeddings=True)
    alone = run(pool, "torch:d1", state, algorithm)[0]
    together = run(pool, layout, state, algorithm)
    assert_close(together[0], alone)
    for other in together[1:]:
        assert other.state is None
        assert [report.shares for report in other.reports] == [report.shares for report in together[0].reports]


@pytest.mark.parametrize("layout", ["megatron:d1t2", "megatron:d1p2", "megatron:d1c2"])
@pytest.mark.parametrize(
    "algorithm",
    [policy("grpo"), policy("gmpo", entropy_coef=0.05), Distill()],
    ids=["grpo", "gmpo with an entropy bonus", "distill"],
)
def test_logits_in_pieces(pool: Ranks, layout: str, algorithm: Algorithm) -> None:
    """Three rows at a time, and not as many pieces on every context rank."""
    state = small_state("qwen3")
    data = [random_samples(0)]
    alone = run(pool, "torch:d1", state, algorithm, 1)[0]
    pieces = pool.run(learn, 2, layout, state, algorithm, data, None, {"logits": 3 * 64})
    assert_close(pieces[0], alone)


def test_a_vocabulary_that_t_does_not_divide(pool: Ranks) -> None:
    state = small_state("qwen2", vocab_size=65)
    alone = run(pool, "torch:d1", state, policy("grpo"))[0]
    together = run(pool, "megatron:d1t2", state, policy("grpo"))[0]
    assert_close(together, alone)
    assert together.state is not None
    assert together.state.weights["lm_head.weight"].shape[0] == 65


@pytest.mark.parametrize("layout", ["megatron:d2", "megatron:d1t2", "megatron:d1p2", "megatron:d1c2"])
def test_a_step_that_is_not_finite_changes_nothing(pool: Ranks, layout: str) -> None:
    good = random_samples(0)
    state = small_state("qwen3")
    grpo = policy("grpo", minibatches=1)
    skipped = pool.run(learn, 2, layout, state, grpo, [good, good, good], 1)
    without = pool.run(learn, 2, layout, state, grpo, [good, good])
    for outcome in skipped:
        assert outcome.reports[1].unchanged == "non-finite loss or gradient"
        assert outcome.reports[1].metrics["steps_skipped"] == 1
    assert skipped[0].state is not None
    assert without[0].state is not None
    assert checkpoint.fingerprint(skipped[0].state) == checkpoint.fingerprint(without[0].state), (
        "and again, byte by byte"
    )


def test_a_run_goes_from_torch_to_megatron_and_back(pool: Ranks) -> None:
    state = small_state("qwen2")
    data = [random_samples(seed) for seed in range(3)]
    whole = pool.run(learn, 1, "torch:d1", state, policy("grpo"), data)[0]
    reports = []
    for layout, batch in zip(("torch:d2", "megatron:d1t2", "torch:d1"), data, strict=True):
        outcome = pool.run(learn, 1 if layout == "torch:d1" else 2, layout, state, policy("grpo"), [batch])[0]
        reports += outcome.reports
        state = outcome.state
    assert_close(Outcome(reports, state), whole)


def test_groups_come_and_go_in_one_process(pool: Ranks) -> None:
    layouts = ["megatron:d2", "megatron:d1t2", "megatron:d1p2", "megatron:d1c2"]
    for seen in pool.run(come_and_go, 2, [*layouts, *layouts, *layouts]):
        assert seen[-1] == seen[3], "nothing is left open"
        assert seen[-1][1] == 0, "no gloo thread is left"


def test_who_leaves_wakes_who_waits(pool: Ranks) -> None:
    assert pool.run(wait_for_the_other, 2)[1] == "left"


def form_without_a_gpu(_: Any, rank: int, world: int, store: Store) -> None:
    """A job for a process that has no shim."""
    make_backend("megatron:d1").form(rank, world, store, 10.0)


def test_without_a_gpu_it_says_so() -> None:
    with Ranks(1) as plain, pytest.raises(RankFailed, match="megatron needs a GPU; use a torch: layout on a CPU"):
        plain.run(form_without_a_gpu, 1)
