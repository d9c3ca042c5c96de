"""Jobs for `ranks.Ranks`: what learner processes do in the tests of backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.backends.base import Backend
from millrace.trainers.backends.factory import make_backend
from millrace.trainers.backends.layout import parse
from millrace.trainers.backends.models.build import SCORE, with_scalar_head
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.backends.torch.compute import Compute
from millrace.trainers.batches.allocation import plan
from millrace.trainers.batches.sample import Sample
from millrace.trainers.learning import Report, Schedule, Trainer
from millrace.trainers.weights.state import State
from tests.support.ranks import descriptors, gloo_threads
from tests.support.samples import groups_of, random_samples, small_state


def reward_model(seed: int = 7) -> State:
    """A small model with a random score, which says something of every token."""
    state = with_scalar_head(small_state(seed=seed))
    head = torch.randn(state.weights[SCORE].shape, generator=torch.Generator().manual_seed(seed))
    return replace(state, weights={**state.weights, SCORE: head})


HELD = {
    "reference": lambda: small_state(seed=5),
    "teacher": lambda: small_state(seed=6),
    "reward_model": reward_model,
}
"""Frozen models of the tests."""


def train_share(
    trainer: Trainer, samples: Sequence[Sample], rank: int, world: int, version: int = 0, oldest: int | None = None
) -> Report:
    """One batch, of which this rank trains what the plan gives it."""
    planned = plan(groups_of(samples, world), world, trainer.algorithm.minibatches)
    mine = {seq for minibatch in planned for seq in minibatch[rank]}
    return trainer.train(
        [sample for sample in samples if sample.seq in mine],
        minibatches=[[seq for share in minibatch for seq in share] for minibatch in planned],
        version=version,
        oldest=oldest,
    )


def train(
    backend: Backend,
    rank: int,
    world: int,
    store: Store,
    state: State,
    algorithm: Algorithm,
    batches: Sequence[Sequence[Sample]],
    budget: int = 10**6,
    filling: Mapping[str, Any] | None = None,
) -> tuple[list[Report], State | None]:
    """Form, load, train each batch, gather, tear down. filling: how the trainer fills micro-batches."""
    backend.form(rank, world, store, 120.0)
    trainer = Trainer(backend, algorithm, Schedule(1e-3), budget=budget, held=HELD, **(filling or {}))
    trainer.load(state)
    cell, cells = backend.data_rank, backend.data_world
    reports = [train_share(trainer, batch, cell, cells, version) for version, batch in enumerate(batches)]
    gathered = backend.gather()
    backend.tear_down()
    return reports, gathered


def train_with(
    idle: TorchBackend,
    rank: int,
    world: int,
    store: Store,
    compute: Compute,
    reshard: bool,
    state: State,
    algorithm: Algorithm,
    batches: Sequence[Sequence[Sample]],
    filling: Mapping[str, Any] | None = None,
) -> tuple[list[Report], State | None]:
    """The same in small micro-batches on a backend that computes otherwise; the process's own stays idle."""
    backend = TorchBackend(device="cpu", compute=compute, reshard=reshard)
    return train(backend, rank, world, store, state, algorithm, batches, 100, filling)


def form_and_wait(backend: TorchBackend, rank: int, world: int, store: Store, state: State, timeout: float) -> str:
    """Form and load, then block in a collective until it fails; says how it failed. The backend is torn down."""
    backend.form(rank, world, store, timeout)
    backend.load(state)
    backend.sum([1.0])
    store.set(f"looping/{rank}", "yes")
    message = ""
    try:
        while True:
            backend.sum([1.0])
    except RuntimeError as error:
        message = str(error)
    backend.tear_down()
    return message


def form_and_leave(backend: TorchBackend, rank: int, world: int, store: Store, state: State, timeout: float) -> str:
    """Rank 0 waits for the others in a collective; the last rank leaves alone, its group still held."""
    backend.form(rank, world, store, timeout)
    backend.load(state)
    backend.sum([1.0])
    held: Any = dist.group.WORLD
    if rank == world - 1:
        backend.tear_down()
        store.set("left", "yes")
        assert held is not None
        return "left"
    message = ""
    try:
        backend.sum([1.0])
    except RuntimeError as error:
        message = str(error)
    backend.tear_down()
    store.get("left")
    return message


def form_in_vain_then_together(backend: TorchBackend, rank: int, world: int, store: Store) -> list[float]:
    """Rank 0 first waits for a peer that never comes; then all form. The sum of ones over all."""
    if rank == 0:
        with suppress(RuntimeError):
            backend.form(0, 2, dist.PrefixStore("vain", store), 0.5)
    backend.form(rank, world, dist.PrefixStore("real", store), 30.0)
    try:
        return backend.sum([1.0])
    finally:
        backend.tear_down()


def form_again(
    backend: TorchBackend, rank: int, world: int, store: Store, state: State, times: int, pieces: int | None = None
) -> list[tuple[int, int]]:
    """Form, load, use and tear down `times` times in one process; open descriptors and gloo's threads after each.
    pieces: on a backend of its own, whose layers are gathered for each pass and whose head is in pieces of so many
    logits."""
    if pieces is not None:
        backend = TorchBackend(device="cpu", compute=Compute(logits=pieces), reshard=True)
    seen = []
    for index in range(times):
        backend.form(rank, world, dist.PrefixStore(str(index), store), 30.0)
        backend.load(state)
        assert backend.sum([1.0, float(rank)]) == [world, world * (world - 1) / 2]
        trainer = Trainer(backend, policy("grpo"), Schedule(5e-4))
        train_share(trainer, random_samples(index), rank, world)
        backend.gather()
        backend.tear_down()
        seen.append((descriptors(), gloo_threads()))
    return seen


def train_in_cell(
    idle: TorchBackend,
    rank: int,
    world: int,
    store: Store,
    layout: str,
    options: dict[str, Any],
    state: State,
    algorithm: Algorithm,
    batches: Sequence[Sequence[Sample]],
    budget: int = 10**6,
) -> tuple[list[Report], State | None]:
    """`train` on a backend whose ranks form cells; the process's own stays idle."""
    backend = TorchBackend(parallel=parse(layout), device="cpu", **options)
    return train(backend, rank, world, store, state, algorithm, batches, budget)


def train_in_allocation(
    idle: TorchBackend,
    rank: int,
    world: int,
    store: Store,
    allocation: str,
    state: State,
    algorithm: Algorithm,
    batches: Sequence[Sequence[Sample]],
) -> tuple[list[Report], State | None]:
    """`train` where roles have ranks of their own."""
    return train(make_backend(allocation, device="cpu"), rank, world, store, state, algorithm, batches)


def train_until_it_breaks(
    idle: TorchBackend, rank: int, world: int, store: Store, allocation: str, state: State, timeout: float
) -> str:
    """PPO where roles have ranks of their own, until a peer is gone; says how it failed."""
    backend = make_backend(allocation, device="cpu")
    backend.form(rank, world, store, timeout)
    trainer = Trainer(backend, policy("ppo"), Schedule(1e-3))
    trainer.load(state)
    message = ""
    try:
        for index in range(10**6):
            train_share(trainer, random_samples(index % 8), backend.data_rank, backend.data_world)
            store.set(f"looping/{rank}", "yes")
    except RuntimeError as error:
        message = str(error)
    backend.tear_down()
    return message


def allocate_again(
    idle: TorchBackend, rank: int, world: int, store: Store, allocation: str, state: State, times: int
) -> list[tuple[int, int]]:
    """Form with roles, train and tear down `times` times in one process; open descriptors and gloo's threads after
    each."""
    seen = []
    backend = make_backend(allocation, device="cpu")
    for index in range(times):
        backend.form(rank, world, dist.PrefixStore(str(index), store), 30.0)
        trainer = Trainer(backend, policy("ppo"), Schedule(5e-4))
        trainer.load(state)
        train_share(trainer, random_samples(index), backend.data_rank, backend.data_world)
        backend.gather()
        backend.tear_down()
        seen.append((descriptors(), gloo_threads()))
    return seen
