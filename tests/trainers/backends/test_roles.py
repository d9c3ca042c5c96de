"""Roles on ranks of their own: what the wire carries, who may stand where, and ranks that come and go."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from millrace.trainers.algorithms.distill import Distill
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.backends.factory import make_backend
from millrace.trainers.backends.layout import parse_allocation
from millrace.trainers.backends.places import places_of
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches import wire
from millrace.trainers.batches.packing import ADVANTAGES, KEEP, RETURNS, MicroBatch, pack
from millrace.trainers.errors import BadConfiguration, NotFormed
from millrace.trainers.learning import Schedule, Trainer
from tests.support.documents import ROOT, blocks
from tests.support.ranks import Ranks
from tests.support.samples import random_samples, small_state
from tests.support.steps import HELD, allocate_again, train_in_allocation, train_until_it_breaks

FEW = "torch[actor]:d2+torch[critic]:d1"


def same(one: MicroBatch, other: MicroBatch) -> None:
    for name in ("tokens", "positions", "at", "labels", "behaviour", "versions", "owners", "ends", "groups"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert (one.runs, one.v_prox, one.v_theta) == (other.runs, other.v_prox, other.v_theta)
    assert (one.paths is None) == (other.paths is None)
    if one.paths is not None and other.paths is not None:
        assert torch.equal(one.paths, other.paths)
    assert one.columns.keys() == other.columns.keys()
    for name, column in one.columns.items():
        assert torch.equal(column, other.columns[name])
    assert (one.samples, one.length, one.trainable) == (other.samples, other.length, other.trainable)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("columns", [(), (ADVANTAGES, KEEP, RETURNS)])
def test_a_micro_batch_is_the_same_on_the_other_side(share: bool, columns: tuple[str, ...]) -> None:
    draw = torch.Generator().manual_seed(3)
    for seed in range(8):
        samples = random_samples(seed, groups=4, group_size=12, longest=12, vocabulary=3)
        micro = pack(samples, share=share)
        micro = micro.attach(**{name: torch.rand(micro.trainable, generator=draw) for name in columns})
        same(wire.decode(wire.encode(micro)), micro)
    idle = pack([], share=share)
    same(wire.decode(wire.encode(idle)), idle)


def test_the_actor_comes_first_and_plays_what_nobody_else_does() -> None:
    places = places_of(parse_allocation("torch[critic]:d2|torch[reference]:d2+torch[actor]:t2"))
    assert [place.roles for place in places] == [("actor",), ("critic", "reference")]
    backend = make_backend("torch[critic]:d1+torch[actor]:d1", device="cpu")
    assert [backend.apart(role) for role in ("actor", "critic", "reference")] == [False, True, False]
    assert isinstance(make_backend("torch[actor]:d2|torch[critic]:d2", device="cpu"), TorchBackend)


def test_what_the_page_shows_makes_a_backend() -> None:
    (block,) = [block for block in blocks(ROOT / "docs" / "backends.md") if block.language == "python"]
    made: dict[str, Any] = {}
    exec(block.text, made)
    assert [made["backend"].apart(role) for role in ("actor", "critic", "reference")] == [False, True, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torch[critic]:d1+torch[reference]:d1", "nobody is the actor"),
        ("torch[actor]:d1+torch[actress]:d1", "no role actress: choose actor, critic"),
        ("torch[actor]:d2+deepspeed[critic]:d2", "run on torch, not on deepspeed"),
        ("torch[actor]:d1+vllm[critic]:d1", "engines are processes of their own"),
        ("torch[actor]:d4|torch[critic]:t4", "share a layout"),
        ("torch[actor]:d1+torch:d1", "no role : choose actor"),
    ],
)
def test_allocations_that_no_learner_can_have_are_refused(text: str, message: str) -> None:
    with pytest.raises(BadConfiguration, match=message):
        make_backend(text, device="cpu")


def test_too_few_ranks_are_refused() -> None:
    with pytest.raises(BadConfiguration, match="1 rank is too few"):
        make_backend(FEW, device="cpu").form(0, 1, HashStore(), 30.0)
    with pytest.raises(BadConfiguration, match="3 ranks leave some over"):
        make_backend("torch[actor]:t2+torch[critic]:d1", device="cpu").form(0, 4, HashStore(), 30.0)


def test_whole_distributions_are_not_sent() -> None:
    with pytest.raises(BadConfiguration, match="a number for each word of the vocabulary"):
        Trainer(make_backend("torch[actor]:d1+torch[teacher]:d1"), Distill(), Schedule(), held=HELD)


def test_use_before_form_and_load_is_refused() -> None:
    backend = make_backend(FEW, device="cpu")
    with pytest.raises(NotFormed):
        backend.sum([1.0])
    with pytest.raises(NotFormed):
        backend.gather()
    backend.tear_down()
    backend.abort()


@pytest.mark.slow
def test_groups_come_and_go_in_one_process(ranks: Ranks) -> None:
    for seen in ranks.run(allocate_again, 3, FEW, small_state(), 6):
        assert {threads for _, threads in seen} == {0}
        assert seen[-1][0] <= seen[2][0], f"descriptors leak: {seen}"


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, 2], ids=["actor", "critic"])
def test_a_rank_that_dies_ends_the_wait_of_all(dies: int) -> None:
    """The process groups' timeout is far away. Those who are left form again."""
    with Ranks(3) as pool:
        pool.run(allocate_again, 3, FEW, small_state(), 1)
        store = pool.start(train_until_it_breaks, range(3), FEW, small_state(), 600.0)
        store.wait([f"looping/{rank}" for rank in range(3)])
        os.kill(pool.processes[dies].pid, signal.SIGKILL)
        left = [rank for rank in range(3) if rank != dies]
        for rank in left:
            assert pool.finish(rank, timeout=120)
        pool.start(train_in_allocation, left, FEW, small_state(), policy("ppo"), [random_samples(0)])
        results = [pool.finish(rank) for rank in left]
        state = results[0][1]
        assert state.critic.step == state.step == 2
        assert results[1][1] is None
        assert [len(reports[0].shares) for reports, _ in results] == [1, 1]
        assert all(torch.isfinite(weight).all() for weight in state.critic.weights.values())
