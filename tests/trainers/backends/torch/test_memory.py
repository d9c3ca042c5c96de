"""The budget of rows: found from a card, halved where a step ran out of memory, recorded."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from millrace.trainers.algorithms.registry import policy
from millrace.trainers.algorithms.sft import Sft
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.backends.torch.compute import Compute
from millrace.trainers.backends.torch.memory import GRAIN, LEAST, MOST, RESERVE, find_budget, probe
from millrace.trainers.errors import BadConfiguration, OutOfMemory
from millrace.trainers.learning import BUDGET, Schedule, Trainer
from tests.support.samples import random_samples, small_state
from tests.support.steps import train_share

GIB = 2**30


@given(
    floor=st.integers(0, 40 * GIB),
    slope=st.integers(1000, 20 * 2**20),
    free=st.integers(0, 80 * GIB),
    total=st.integers(80 * GIB, 140 * GIB),
)
def test_a_row_of_the_budget_fits_and_one_grain_more_would_not(floor: int, slope: int, free: int, total: int) -> None:
    def peak(tokens: int) -> int:
        return floor + slope * tokens

    usable = free - RESERVE * total
    if peak(LEAST) > usable:
        assume(peak(LEAST) > usable + slope)  # the grain's rounding
        with pytest.raises(BadConfiguration, match=r"GiB of the card.*activation_checkpointing"):
            find_budget(peak, free, total)
        return
    budget = find_budget(peak, free, total)
    assert LEAST <= budget <= MOST
    assert budget % GRAIN == 0
    assert peak(budget) <= usable + slope
    assert budget == MOST or peak(budget + 2 * GRAIN) > usable


def no_more_than(limit: int, slope: int = 2**20) -> Callable[[int], int]:
    """A pass on a card with room for so many tokens."""

    def measure(tokens: int) -> int:
        if tokens > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return GIB + slope * tokens

    return measure


@given(limit=st.integers(1, 4096))
def test_sizes_that_do_not_fit_are_halved_down_to_the_least_row(limit: int) -> None:
    room = GIB + (limit << 20) + GIB
    if limit < LEAST:
        with pytest.raises(BadConfiguration, match=r"a row of 256 tokens takes more: .*activation_checkpointing"):
            find_budget(no_more_than(limit), room, GIB)
        return
    assert find_budget(no_more_than(limit), room, 0) == (limit + 1024) // GRAIN * GRAIN, "as by any two sizes"


def test_a_rank_among_others_halves_no_size() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        find_budget(no_more_than(1000), 80 * GIB, 80 * GIB, alone=False)


class FullCard(TorchBackend):
    """A backend whose card has no room for passes that measure."""

    def room(self) -> int | None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("least", [-math.inf, -100.0])
def test_who_ran_out_of_memory_measuring_measures_no_more(monkeypatch: pytest.MonkeyPatch, least: float) -> None:
    """-100: another rank has shortened its rows to that."""
    backend = FullCard(device="cpu")
    backend.form(0, 1, None, 30.0)
    trainer = Trainer(backend, Sft(), Schedule(1e-3), budget=None)
    state, samples = small_state(), random_samples(0)
    trainer.load(state)
    with pytest.raises(OutOfMemory, match=r"it can be done again with rows of"):
        train_share(trainer, samples, 0, 1, 0)
    shortened = trainer.budget
    assert shortened <= sum(sample.length for sample in samples) // 2
    trainer.load(state)
    monkeypatch.setattr(backend, "max", lambda values: [max(value, least) for value in values])
    assert train_share(trainer, samples, 0, 1, 0).unchanged is None
    assert trainer.budget == min(shortened, -least)


@given(tokens=st.sampled_from([64, 512, 2048]), longest=st.integers(2, 4096))
def test_a_probe_has_so_many_tokens_in_samples_that_the_model_takes(tokens: int, longest: int) -> None:
    micro = probe(tokens, 100, longest)
    assert tokens - longest < micro.length <= tokens
    assert max(member.length for member in micro.members) <= longest
    assert int(micro.tokens.max()) < 100


def trainer_of(budget: int | None = None, **options: Any) -> Trainer:
    backend = TorchBackend(device="cpu", **options)
    backend.form(0, 1, None, 30.0)
    trainer = Trainer(backend, policy("grpo"), Schedule(1e-3), budget=budget)
    trainer.load(small_state())
    return trainer


def test_measuring_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes that measure are real ones; after them a step gives what it gives without them."""
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    weights = []
    for measures in (False, True):
        trainer = trainer_of(150, compute=Compute(bf16=True))
        backend = trainer.backend
        assert isinstance(backend, TorchBackend)
        if measures:
            backend._role("actor").peak_memory(64, 32)
        train_share(trainer, random_samples(0), 0, 1, 0)
        state = backend.gather()
        assert state is not None
        weights.append(state.weights)
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


def test_the_least_of_what_ranks_have_room_for_is_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of()
    assert trainer.budget == BUDGET, "nothing on a CPU says"
    monkeypatch.setattr(trainer.backend, "room", lambda: 1024)
    monkeypatch.setattr(trainer.backend, "max", lambda values: [max(v, -512.0) if v > -math.inf else v for v in values])
    train_share(trainer, random_samples(0), 0, 1, 0)
    assert trainer.budget == 512
    assert trainer.kernels["tokens_per_pack"] == "512"
    trainer.load(small_state())
    trainer.fix_budget(300)
    train_share(trainer, random_samples(0), 0, 1, 0)
    assert trainer.budget == 300, "as a record says, not as this device would"


class Small(TorchBackend):
    """A backend on a card that rows of more than `limit` tokens do not fit in."""

    limit = 150

    def step(self, micros: Any, *arguments: Any, **keywords: Any) -> Any:
        if any(micro.length > self.limit and micro.samples > 1 for micro in micros):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
        return super().step(micros, *arguments, **keywords)


def test_a_step_that_ran_out_of_memory_is_done_again_with_shorter_rows() -> None:
    backend = Small(device="cpu")
    backend.form(0, 1, None, 30.0)
    trainer = Trainer(backend, Sft(), Schedule(1e-3), budget=1000)
    state, samples = small_state(), random_samples(0)
    trainer.load(state)
    budgets, tokens = [], sum(sample.length for sample in samples)
    while trainer.budget > Small.limit:
        budgets.append(trainer.budget)
        rows = min(trainer.budget, tokens)
        with pytest.raises(OutOfMemory, match=rf"rows of {rows} tokens ran out of memory \(CUDA out of") as out:
            train_share(trainer, samples, 0, 1, 0)
        assert f"rows of {trainer.budget}: [learner] tokens_per_pack" in str(out.value)
        trainer.load(state)
    report = train_share(trainer, samples, 0, 1, 0)
    assert (budgets, trainer.budget) == ([1000, tokens // 2], tokens // 4)
    assert report.unchanged is None
    plain = Trainer(backend, Sft(), Schedule(1e-3), budget=tokens // 4)
    gathered = backend.gather()
    plain.load(state)
    train_share(plain, samples, 0, 1, 0)
    again = backend.gather()
    assert gathered is not None
    assert again is not None
    assert all(torch.equal(tensor, again.weights[name]) for name, tensor in gathered.weights.items())


def test_a_sample_that_does_not_fit_alone_ends_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(1)

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried ...")

    monkeypatch.setattr(trainer.backend, "step", fail)
    with pytest.raises(BadConfiguration, match=r"a sample of \d+ tokens does not fit .*activation_checkpointing"):
        train_share(trainer, random_samples(0), 0, 1, 0)


def test_the_optimizer_in_main_memory_takes_the_same_steps() -> None:
    made = []
    for away in (False, True):
        trainer = trainer_of(150, compute=Compute(bf16=True, optimizer_offload=away))
        for seed in range(2):
            train_share(trainer, random_samples(seed), 0, 1, seed)
        assert trainer.kernels["optimizer"] == ("main memory" if away else "plain")
        made.append(trainer.backend.gather())
    first, second = made
    assert first is not None
    assert second is not None
    for name, tensor in first.weights.items():
        assert torch.equal(tensor, second.weights[name]), name
        assert torch.equal(first.moments["exp_avg_sq"][name], second.moments["exp_avg_sq"][name])


def test_an_optimizer_that_cannot_go_to_main_memory_is_refused() -> None:
    with pytest.raises(BadConfiguration, match='precision = "bf16" and one learner'):
        trainer_of(150, compute=Compute(optimizer_offload=True))


def test_the_budget_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of()
    with caplog.at_level(logging.INFO, "millrace.learning"):
        for seed in range(2):
            train_share(trainer, random_samples(seed), 0, 1, seed)
    assert [record.getMessage() for record in caplog.records].count(f"rows of {BUDGET} tokens") == 1
