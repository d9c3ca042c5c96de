"""A rank at work: a step from its samples to a version on disk, through the learner's own trainer and checkpoint.

Invariant: what decides a byte happens as in `learner.step.generation`, in the same order: form, cells, load, then
train and gather step by step, and write on rank 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from millrace.consumers.learner.build import build_trainer
from millrace.consumers.learner.group import rank_numbers
from millrace.consumers.learner.group.rendezvous import STORE_TIMEOUT_S
from millrace.consumers.replay.prove import step_folder
from millrace.consumers.replay.prove.step_folder import TrainedStep
from millrace.infra.config import Settings
from millrace.infra.process.net import LOCALHOST
from millrace.trainers.backends.base import StepResult
from millrace.trainers.batches.packing import MicroBatch
from millrace.trainers.learning import Trainer
from millrace.trainers.weights import checkpoint

FIELDS = ("tokens", "positions", "at", "labels", "behaviour", "versions", "owners", "ends", "groups")


class RankLayout(NamedTuple):
    """Of ranks that formed a group. name: as the ledger has it; cells: by rank."""

    name: str
    cells: list[int]


class StepRecorder:
    """Records the micro-batches of a rank's optimizer steps, and writes them to files that anything reads.

    rank0.safetensors   <minibatch>/<micro-batch>/tokens, positions, at, labels, behaviour, versions, owners, ends,
                        groups and the columns (advantages, keep, ...): shapes of `trainers.batches.packing.MicroBatch`
    rank0.json          of each minibatch: loss, gradient norm, learning rate, whether it was applied; its samples
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._steps: list[dict[str, Any]] = []

    def __call__(self, micros: Sequence[MicroBatch], result: StepResult, lr: float) -> None:
        """Keep one step."""
        number = len(self._steps)
        for index, micro in enumerate(micros):
            fields = {name: getattr(micro, name) for name in FIELDS}
            for name, tensor in {**fields, **micro.columns}.items():
                # A copy: columns share storage among each other, which the format refuses.
                self._tensors[f"{number}/{index}/{name}"] = tensor.detach().cpu().clone().contiguous()
        self._steps.append(
            {
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": lr,
                "applied": result.applied,
                "sums": result.sums,
                "micro_batches": [
                    [{"trajectory": s.trajectory, "lineage": s.lineage, "seq": s.seq} for s in micro.members]
                    for micro in micros
                ],
            }
        )

    def write(self, folder: Path, rank: int) -> None:
        """The files of this rank."""
        save_file(self._tensors, folder / f"rank{rank}.safetensors")
        (folder / f"rank{rank}.json").write_text(json.dumps(self._steps, indent=1) + "\n")


class RankWorker:
    """One rank. Its methods are the orders of the `WorkerPool`; they raise what learning raises."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._timeout_s = 0.0
        self._rank = 0
        self._cells: list[int] = []

    @property
    def _learner(self) -> Trainer:
        assert self._trainer is not None, "prepared first"
        return self._trainer

    def prepare(self, settings: Settings) -> None:
        """Make the trainer that these settings describe."""
        if self._trainer is not None:
            self._trainer.backend.tear_down()
        torch.set_num_threads(settings.learner.threads)
        self._trainer = build_trainer(settings)
        self._timeout_s = settings.learner.collective_timeout_s

    def form(self, rank: int, world: int, port: int, key: str, start: Path, digest: str) -> RankLayout:
        """Be `rank` of `world` ranks that meet under `key` in the store at `port`, and load the version in `start`."""
        backend = self._learner.backend
        store: Store | None = None
        if world > 1:
            patience = timedelta(seconds=STORE_TIMEOUT_S)
            store = TCPStore(LOCALHOST, port, is_master=False, wait_for_workers=False, timeout=patience)
            store = PrefixStore(key, store)
        backend.form(rank, world, store, self._timeout_s)
        self._rank = rank
        self._cells = rank_numbers.cells(backend)
        self._learner.load(checkpoint.read(start, digest=digest))
        return RankLayout(backend.layout, self._cells)

    def train(self, folder: Path, root: Path, batch_folder: Path | None) -> TrainedStep:
        """Train the step in `folder`; rank 0 writes the version under `root`. batch_folder: takes the micro-batches as
        they trained, where they are wanted."""
        trainer, backend = self._learner, self._learner.backend
        step = step_folder.read(folder)
        samples = step.share(self._cells[self._rank]) if backend.acts else []
        recorder = StepRecorder() if batch_folder is not None else None
        trainer.stepped = recorder
        if step.budget:
            trainer.fix_budget(step.budget)
        report = trainer.train(samples, minibatches=step.minibatches, version=step.parent, oldest=step.oldest)
        state = backend.gather()
        if recorder is not None and batch_folder is not None:
            recorder.write(batch_folder, self._rank)
        if state is None:
            return TrainedStep(report.metrics, report.unchanged)
        version = checkpoint.write(root, step.version, state)
        return TrainedStep(report.metrics, report.unchanged, version.path, version.digest, version.files)

    def leave(self) -> None:
        """Tear the group down."""
        self._learner.backend.tear_down()
