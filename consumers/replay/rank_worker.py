"""A rank at work: a step from its samples to a version on disk, through the learner's own trainer and checkpoint.

Invariant: what decides a byte happens as in `learner.step.generation`, in the same order: form, cells, load, then
train and gather step by step, and write on rank 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from millrace.consumers.learner.build import build_trainer
from millrace.consumers.learner.group import rank_numbers
from millrace.consumers.learner.group.rendezvous import STORE_TIMEOUT_S
from millrace.consumers.replay import material
from millrace.consumers.replay.orders import (
    Answer,
    Done,
    Formed,
    FormGroup,
    Leave,
    Order,
    Prepare,
    TrainedStep,
    TrainStep,
)
from millrace.trainers.backends.base import StepResult
from millrace.trainers.batches.packing import Packed
from millrace.trainers.learning import Trainer
from millrace.trainers.weights import checkpoint

HERE = "127.0.0.1"
FIELDS = ("tokens", "positions", "at", "labels", "behaviour", "versions", "owners", "ends", "groups")


class StepRecorder:
    """Records the micro-batches of a rank's optimizer steps, and writes them to files that anything reads.

    rank0.safetensors   <minibatch>/<micro-batch>/tokens, positions, at, labels, behaviour, versions, owners, ends,
                        groups and the columns (advantages, keep, ...): shapes as in `trainers.batches.packing.Packed`
    rank0.json          of each minibatch: loss, gradient norm, learning rate, whether it was applied; its samples
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._steps: list[dict[str, Any]] = []

    def __call__(self, micros: Sequence[Packed], result: StepResult, lr: float) -> None:
        """Keep one step."""
        number = len(self._steps)
        for index, micro in enumerate(micros):
            named = {name: getattr(micro, name) for name in FIELDS}
            for name, tensor in {**named, **micro.columns}.items():
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
    """One rank; `obey` raises what learning raises."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._timeout_s = 0.0
        self._rank = 0
        self._cells: list[int] = []

    def obey(self, order: Order) -> Answer:
        """Do it."""
        match order:
            case Prepare():
                return self._prepare(order)
            case FormGroup():
                return self._form(order)
            case TrainStep():
                return self._train(order)
            case Leave():
                self._built.backend.tear_down()
                return Done()

    @property
    def _built(self) -> Trainer:
        assert self._trainer is not None, "prepared first"
        return self._trainer

    def _prepare(self, order: Prepare) -> Done:
        if self._trainer is not None:
            self._trainer.backend.tear_down()
        torch.set_num_threads(order.settings.learner.threads)
        self._trainer = build_trainer(order.settings)
        self._timeout_s = order.settings.learner.collective_timeout_s
        return Done()

    def _form(self, order: FormGroup) -> Formed:
        backend = self._built.backend
        store: Store | None = None
        if order.world > 1:
            store = TCPStore(
                HERE,
                order.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=STORE_TIMEOUT_S),
            )
            store = PrefixStore(order.key, store)
        backend.form(order.rank, order.world, store, self._timeout_s)
        self._rank = order.rank
        self._cells = rank_numbers.cells(backend)
        self._built.load(checkpoint.read(order.start, digest=order.digest))
        return Formed(backend.layout, self._cells)

    def _train(self, order: TrainStep) -> TrainedStep:
        trainer = self._built
        backend = trainer.backend
        step = material.read(order.material)
        samples = step.share(self._cells[self._rank]) if backend.acts else []
        recorder = StepRecorder() if order.packed is not None else None
        trainer.stepped = recorder
        report = trainer.train(samples, minibatches=step.minibatches, version=step.parent, oldest=step.oldest)
        state = backend.gather()
        if recorder is not None and order.packed is not None:
            recorder.write(order.packed, self._rank)
        if state is None:
            return TrainedStep(report.metrics, report.unchanged)
        written = checkpoint.write(order.root, step.version, state)
        return TrainedStep(report.metrics, report.unchanged, written.path, written.digest, written.files)
