"""The run that every case repeats: three GRPO steps and one of SFT on unequal samples, the clip always at work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.distributed_c10d import Store

from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.algorithms.sft import Sft
from millrace.trainers.backends.base import Adam, Backend
from millrace.trainers.backends.factory import make_backend
from millrace.trainers.learning import Schedule, Trainer
from millrace.trainers.weights.state import State
from tests.support.ranks import meet
from tests.support.samples import random_samples
from tests.support.steps import HELD, train_share

CLIP = 0.02
BUDGET = 150
"""Tokens a micro-batch: several a step, and not as many on every rank."""
LR = 1e-3
STEPS = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank saw: of each step its loss and its gradient norm before clipping; the layout's name; on rank 0 the
    state at the end."""

    losses: list[float]
    norms: list[float]
    layout: str
    data_rank: int
    state: State | None


def steps(first: int = 0, last: int = STEPS) -> list[tuple[Algorithm, int]]:
    """(algorithm, seed of the batch) of each step: three of GRPO, then SFT."""
    grpo = policy("grpo", minibatches=1)
    return [(Sft() if index == STEPS - 1 else grpo, index) for index in range(first, last)]


def train(
    backend: Backend, rank: int, world: int, store: Store | None, state: State, wanted: list[tuple[Algorithm, int]]
) -> Outcome:
    """Form, load, take the steps, gather, tear down."""
    backend.form(rank, world, store, 60.0)
    losses, norms = [], []
    try:
        Trainer(backend, wanted[0][0], Schedule(LR), held=HELD).load(state)
        layout, data_rank = backend.layout, backend.data_rank
        speak(backend)
        for algorithm, seed in wanted:
            trainer = Trainer(backend, algorithm, Schedule(LR), budget=BUDGET, held=HELD)
            samples = random_samples(seed, groups=6, group_size=3, longest=24)
            report = train_share(trainer, samples, data_rank, backend.data_world, version=0)
            assert report.unchanged is None, report
            assert len(report.shares) == backend.data_world
            losses.append(report.metrics["loss"])
            norms.append(report.metrics["grad_norm"])
        gathered = backend.gather()
    finally:
        backend.tear_down()
    return Outcome(losses, norms, layout, data_rank, gathered)


def speak(backend: Backend) -> None:
    """All ranks of the world hear rank 0, and of every rank its largest number, whatever they play."""
    for message in (b"", bytes(range(256)) * 300):
        assert backend.announce(message if backend.rank == 0 else None) == message
    mine = [float(rank == backend.rank) for rank in range(backend.world)]
    assert backend.max(mine) == [1.0] * backend.world


def train_layout(
    _: Any,
    rank: int,
    world: int,
    store: Store,
    layout: str,
    options: Mapping[str, Any],
    prepare: Callable[[], None] | None,
    state: State,
    wanted: list[tuple[Algorithm, int]],
) -> Outcome:
    """A job for `ranks.Ranks`: the run under a layout."""
    if prepare is not None:
        prepare()
    backend = make_backend(layout, Adam(weight_decay=0.01, clip=CLIP), **options)
    meet(rank, world, store, "forming")
    return train(backend, rank, world, store, state, wanted)
