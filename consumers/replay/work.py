"""A rank at work: a step from its samples to a version on disk, through the learner's own trainer and checkpoint.

Invariant: what decides a byte happens as in `learner.generation`, in the same order: form, cells, load, then train and
gather step by step, and write on rank 0.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from millrace.consumers.learner.build import build_trainer
from millrace.consumers.learner.group import rank_numbers
from millrace.consumers.learner.group.rendezvous import STORE_TIMEOUT_S
from millrace.consumers.replay import material, packed
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
from millrace.trainers.learning import Trainer
from millrace.trainers.weights import checkpoint

HERE = "127.0.0.1"


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
        seen = packed.StepRecorder() if order.packed is not None else None
        trainer.stepped = seen
        report = trainer.train(samples, minibatches=step.minibatches, version=step.parent, oldest=step.oldest)
        state = backend.gather()
        if seen is not None and order.packed is not None:
            seen.write(order.packed, self._rank)
        if state is None:
            return TrainedStep(report.metrics, report.unchanged)
        written = checkpoint.write(order.root, step.version, state)
        return TrainedStep(report.metrics, report.unchanged, written.path, written.digest, written.files)
