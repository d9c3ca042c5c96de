"""Steps of a run done again from the same states by another number of ranks, compared with what the run made of them.

Invariants: what a learner does is done by a learner's own parts (order of batches, manifest, reading, trainer); ranks
own partitions as a group of so many would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from benchmarks.layout_runs import SHARDS, Outcome, Recording
from millrace.apps.demo.tiny import VOCABULARY
from millrace.consumers.learner.build import build_trainer
from millrace.consumers.learner.group.agreement import Peer, Roster
from millrace.consumers.learner.step import next_work
from millrace.consumers.learner.step.reading import read
from millrace.consumers.learner.version.order import LearningOrder
from millrace.infra.config import load
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.history.places import PlaceReader
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.schemas import codec
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.sample import Sample
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.state import State
from tests.support.ranks import Ranks

LONGEST = 512


@dataclass(frozen=True, slots=True)
class Again:
    """One step for all ranks: from which directory, to compare with which, and what each rank trains."""

    version: int
    begin: Path
    end: Path
    minibatches: list[list[int]]
    shares: list[list[Sample]]


@dataclass(frozen=True, slots=True)
class Redone:
    """A step's loss, gradient norm and whether its bytes are the run's; weights: largest absolute difference."""

    loss: float
    grad_norm: float
    weights: float
    same: bool


@dataclass(frozen=True, slots=True)
class Worst:
    """Over all steps, against the run: absolute loss, relative gradient norm, absolute weight; steps of equal bytes."""

    loss: float
    grad_norm: float
    weights: float
    same: int


def roster(world: int) -> Roster:
    """Ranks that own the partitions as the range assignor gives them to `world` members."""
    base, more = divmod(SHARDS, world)
    cuts = [rank * base + min(rank, more) for rank in range(world + 1)]
    owned = [tuple(range(cuts[rank], cuts[rank + 1])) for rank in range(world)]
    return Roster(str(world), 1, tuple(Peer(str(r), str(r), "", 0, own) for r, own in enumerate(owned)), 0)


def steps_of(recording: Recording, run: Outcome, world: int) -> list[Again]:
    """Every step of `run`, for `world` ranks."""
    settings = load(run.file, {})
    order = LearningOrder(settings.policy.batch, settings.policy.eta, settings.policy.release)
    for records in recording.resolutions:
        for one in records:
            order.fold(codec.decode_as("Resolution", one.value or b""))
    bus = KafkaBus(recording.bootstrap)
    reader = PlaceReader(bus, ClaimStore(settings.claims))
    steps = []
    for number, row in enumerate(run.rows[1:]):
        batch = order.next(row["seq_lo"])
        assert batch is not None
        told = next_work.manifest(batch, roster(world), range(world), number, settings.learner.minibatches, None)
        shares = [read(reader, share, vocabulary=VOCABULARY, longest=LONGEST) for share in told.shares]
        assert not any(share.lost for share in shares)
        ends = run.directory(number), run.directory(number + 1)
        steps.append(Again(number, *ends, told.minibatches, [share.samples for share in shares]))
    bus.close()
    return steps


def redo(
    _: TorchBackend, rank: int, world: int, store: Store, file: Path, steps: Sequence[Again]
) -> list[Redone] | None:
    """A job for `Ranks`; the results are rank 0's."""
    trainer = build_trainer(load(file, {}))
    backend = trainer.backend
    backend.form(rank, world, store if world > 1 else None, 120.0)
    found = []
    for step in steps:
        trainer.load(checkpoint.read(step.begin))
        report = trainer.train(step.shares[rank], minibatches=step.minibatches, version=step.version)
        state = backend.gather()
        if state is not None:
            made = checkpoint.read(step.end)
            same = checkpoint.fingerprint(state) == checkpoint.fingerprint(made)
            found.append(Redone(report.metrics["loss"], report.metrics["grad_norm"], apart(state, made), same))
    backend.tear_down()
    return found if rank == 0 else None


def apart(one: State, other: State) -> float:
    """Largest absolute difference of two states' weights."""
    return max(float((tensor - other.weights[name]).abs().max()) for name, tensor in one.weights.items())


def compare(recording: Recording, run: Outcome, world: int, ranks: Ranks) -> Worst:
    """Do every step of `run` again with `world` ranks, each from the version that the run trained it from."""
    found: list[Redone] = ranks.run(redo, world, run.file, steps_of(recording, run, world))[0]
    pairs = [(one, row["metrics"]) for one, row in zip(found, run.rows[1:], strict=True)]
    return Worst(
        loss=max(abs(one.loss - row["loss"]) for one, row in pairs),
        grad_norm=max(abs(one.grad_norm / row["grad_norm"] - 1) for one, row in pairs),
        weights=max(one.weights for one in found),
        same=sum(one.same for one in found),
    )
