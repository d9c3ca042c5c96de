"""Jobs for `ranks.Ranks` that run DeepSpeed in the processes; each process keeps none of it between jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from millrace.trainers.algorithms.base import Algorithm, Sums
from millrace.trainers.algorithms.sft import Sft
from millrace.trainers.backends.base import Adam
from millrace.trainers.backends.deepspeed.backend import DeepSpeedBackend
from millrace.trainers.batches.packing import Packed
from millrace.trainers.batches.sample import Sample
from millrace.trainers.learning import Report, Schedule, Trainer
from millrace.trainers.weights.state import State
from tests.support.ranks import descriptors, gloo_threads, meet
from tests.support.samples import random_samples
from tests.support.steps import HELD, train_share

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

    def loss(self, logprobs: Any, entropy: Any, batch: Packed) -> tuple[Any, Sums]:
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
