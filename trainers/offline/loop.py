"""The loop of training from files: batches in an order of their own, a version now and then, the numbers of each step.

Version n holds the weights after n batches, or, where versions are dense, after n times `save_every` batches; so a run
that was killed goes on from its newest whole version and ends with the same bytes as one that was not. `run.json`
beside the versions says what made them; another run is refused.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from millrace.infra import durable
from millrace.infra.versions import NAME, remove
from millrace.trainers import flops
from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.backends.layout import ACTOR
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.packing import PROXIMAL, Floats, cut, pack
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration, CheckpointError, CorruptCheckpoint
from millrace.trainers.learning import Trainer
from millrace.trainers.offline.order import ItemOrder
from millrace.trainers.tracking.base import Tracker
from millrace.trainers.weights import checkpoint, manifest
from millrace.trainers.weights.checkpoint import Checkpoint, Fault
from millrace.trainers.weights.state import State

ABOUT = "run.json"
SAVE_AFTER_S = 300.0
"""seconds of training that a kill may lose, beside the batch in work"""

Batch = Callable[[int, Sequence[int]], list[Sample]]
"""Step and items -> their samples; seq is the place among the items. Step -1: of what is held out."""


class RunObserver:
    """Follows a run; this one does nothing."""

    def on_refusal(self, where: str, reason: str) -> None:
        """A row is left out."""

    def on_start(self, step: int, steps: int, items: int) -> None:
        """Training goes from `step` to `steps`; `items` are learned from."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One batch is done; `step` counts from 1."""

    def on_version(self, version: Checkpoint) -> None:
        """A version is durable."""

    def warn(self, text: str) -> None:
        """Something worth a line happened."""


@dataclass(frozen=True, slots=True)
class RunPace:
    """steps: batches in all. evaluate_every: in batches; 0: at the end alone. save_every: in batches; 0: whenever
    save_after_s seconds have passed, so that a kill loses little. keep: newest versions whose files are kept. dense:
    versions are counted 1, 2, ... by saves, which needs a save_every, and not by batches."""

    steps: int
    evaluate_every: int = 0
    save_every: int = 0
    keep: int = 2
    save_after_s: float = SAVE_AFTER_S
    dense: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1 or self.keep < 1 or self.evaluate_every < 0 or self.save_every < 0:
            raise BadConfiguration("steps and keep must be above 0, evaluate_every and save_every not below")
        if self.dense and not self.save_every:
            raise BadConfiguration("dense versions are one every save_every batches: set save_every above 0")

    def version(self, step: int) -> int:
        """The number of the version that holds the weights after `step` batches."""
        return -(-step // self.save_every) if self.dense else step

    def after(self, version: int) -> int:
        """How many batches a version has behind it."""
        return min(version * self.save_every, self.steps) if self.dense else version


def train(
    trainer: Trainer,
    backend: TorchBackend,
    begin: Callable[[], State],
    batch: Batch,
    order: ItemOrder,
    pace: RunPace,
    out: Path,
    *,
    about: Mapping[str, object],
    resume: bool = False,
    trackers: Sequence[Tracker] = (),
    observer: RunObserver | None = None,
    fault: Fault = lambda name: None,
) -> Checkpoint:
    """Train `trainer`, whose formed backend is `backend`, until `pace.steps`; gives the last version.

    about: what this run is, JSON; a directory of another run is refused. Raises BadConfiguration when `out` holds
    versions and `resume` is not set, or of a run that was another."""
    observer = observer or RunObserver()
    beginning, state = _beginning(out, about, resume, begin, observer)
    start = pace.after(beginning)
    trainer.load(state)
    observer.on_start(start, pace.steps, order.count - len(order.held_out))
    evaluate = partial(_held_out, trainer, backend, batch, order.held_out)
    newest = _newest(out, beginning)
    if start == 0 and order.held_out:
        _log(trackers, observer, 0, evaluate())
    saved_at = time.monotonic()
    for step in range(start + 1, pace.steps + 1):
        began = time.perf_counter()
        samples = batch(step - 1, order.items(step - 1))
        count = trainer.algorithm.minibatches
        seqs = sorted({sample.seq for sample in samples})
        cuts = [seqs[len(seqs) * i // count : len(seqs) * (i + 1) // count] for i in range(count)]
        report = trainer.train(samples, minibatches=cuts, version=step - 1)
        metrics = report.metrics
        metrics["tokens_per_second"] = metrics["tokens_computed"] / (time.perf_counter() - began)
        metrics |= flops.utilisation(state, metrics, 1)
        metrics["epoch"] = step / order.steps
        last = step == pace.steps
        if order.held_out and (last or (pace.evaluate_every and step % pace.evaluate_every == 0)):
            metrics |= evaluate()
        if report.unchanged:
            observer.warn(f"step {step} changed nothing: {report.unchanged}")
        _log(trackers, observer, step, metrics)
        fault("offline.after_step")
        is_due = step % pace.save_every == 0 if pace.save_every else time.monotonic() - saved_at >= pace.save_after_s
        if last or is_due:
            newest = _save(out, pace.version(step), backend, pace.keep, fault)
            saved_at = time.monotonic()
            observer.on_version(newest)
            fault("offline.after_save")
    assert newest is not None, "a run has steps"
    return newest


def _log(trackers: Sequence[Tracker], observer: RunObserver, step: int, metrics: Mapping[str, float]) -> None:
    for tracker in trackers:
        tracker.log(step, metrics)
    observer.on_step(step, metrics)


def _held_out(trainer: Trainer, backend: TorchBackend, batch: Batch, items: Sequence[int]) -> dict[str, float]:
    # A student answers anew each time: what it says changes with it.
    means = measure(backend, trainer.algorithm, batch(-1, items), trainer.budget)
    return {f"heldout_{name}": value for name, value in means.items()}


def _save(out: Path, version: int, backend: TorchBackend, keep: int, fault: Fault) -> Checkpoint:
    state = backend.gather()
    if state is None:
        raise CheckpointError("only rank 0 holds the whole state; run in a world of one")
    newest = checkpoint.write(out, version, state, fault=fault)
    for _, path in versions(out)[:-keep]:
        remove(path)
    return newest


# ---- where a run begins


def versions(out: Path) -> list[tuple[int, Path]]:
    """The versions in `out`, oldest first."""
    names = [(NAME.fullmatch(path.name), path) for path in out.glob("v*-*") if path.is_dir()]
    return sorted((int(name["version"]), path) for name, path in names if name)


def _beginning(
    out: Path, about: Mapping[str, object], resume: bool, begin: Callable[[], State], observer: RunObserver
) -> tuple[int, State]:
    existing = versions(out)
    path = out / ABOUT
    if path.is_file() and (existing or resume):
        _compare(path, about)
    if existing and not resume:
        raise BadConfiguration(f"{out} holds versions up to {existing[-1][0]}: go on with --resume, or name another")
    checkpoint.sweep(out, older_than=0.0)
    if not path.is_file():
        _describe(path, about)
    for number, directory in reversed(existing):
        try:
            return number, checkpoint.read(directory)
        except CorruptCheckpoint as error:
            observer.warn(f"version {number} is left out: {error}")
    _describe(path, about)
    return 0, begin()


def _describe(path: Path, about: Mapping[str, object]) -> None:
    durable.make_folder(path.parent)
    durable.write(path, json.dumps(about, indent=1, sort_keys=True) + "\n", mode=durable.SHARED_MODE)


def _compare(path: Path, about: Mapping[str, object]) -> None:
    former, current = json.loads(path.read_bytes()), json.loads(json.dumps(about))
    wrong = [name for name in sorted({*former, *current}) if former.get(name) != current.get(name)]
    if wrong:
        raise BadConfiguration(
            f"{path.parent} was made with other settings ({', '.join(wrong)}): use the same, or another directory"
        )


def _newest(out: Path, version: int) -> Checkpoint | None:
    for number, path in versions(out):
        if number == version:
            listing = manifest.load(path)
            return Checkpoint(path, listing.digest, listing.files)
    return None


def measure(backend: TorchBackend, algorithm: Algorithm, samples: Sequence[Sample], budget: int) -> dict[str, float]:
    """Mean loss and measures over `samples`, by name. Backends of one rank; no weight changes."""
    totals: dict[str, float] = {"loss": 0.0, "count": 0.0, **dict.fromkeys(algorithm.measures, 0.0)}
    model = backend.model
    model.train(False)
    try:
        micros = [pack(members) for members in cut(samples, budget, unite=algorithm.whole)]
        scores: dict[str, dict[Sample, Floats]] = {}
        for name in algorithm.needs:
            columns = backend.score(micros, algorithm.temperature, ACTOR if name == PROXIMAL else name)
            rows = [micro.split(column) for micro, column in zip(micros, columns, strict=True)]
            scores[name] = {sample: row for split in rows for sample, row in split.items()}
        weights = algorithm.weigh([sample for micro in micros for sample in micro.members], None, scores)
        for micro in (micro.attach_samples(weights) for micro in micros):
            with torch.no_grad():
                loss_sum, sums = algorithm.evaluate(backend.passes(micro))
            totals["loss"] += float(loss_sum)
            totals["count"] += algorithm.count(micro)
            for name, value in sums.items():
                totals[name] += float(value)
    finally:
        model.train(True)
    tokens, count, loss = (totals.pop(name) for name in ("kept", "count", "loss"))
    means = {name: value / tokens if tokens else math.nan for name, value in totals.items()}
    return {"loss": loss / count if count else math.nan, **means}
