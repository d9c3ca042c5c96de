"""One model of the Megatron backend: this rank's part of it, and its distributed optimizer unless it is frozen.

Megatron's schedules run the micro-batches (through the pipeline, where there is one), its buffers reduce gradients, its
optimizer updates each rank's shard and gathers the parameters. Ours are the loss, divided once by the whole minibatch's
denominator; the gradient norm, in float64 over all shards; and the decision whether a step applies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.backends.base import Adam, StepResult
from millrace.trainers.backends.megatron.config import architecture, check
from millrace.trainers.backends.megatron.forward import Feed, MicroBatchRun, feed
from millrace.trainers.backends.megatron.groups import MegatronGroups
from millrace.trainers.backends.megatron.model import PackedGPT
from millrace.trainers.backends.megatron.optimizer import Optimizer
from millrace.trainers.backends.megatron.transfer import collect
from millrace.trainers.backends.megatron.weights import check_state, fill, pieces
from millrace.trainers.backends.models.head import LOGITS, Rows
from millrace.trainers.backends.seeding import seed_step
from millrace.trainers.batches.packing import MicroBatch
from millrace.trainers.errors import BadConfiguration, NotFormed
from millrace.trainers.phase_clock import Clock
from millrace.trainers.weights.state import State


@dataclass(frozen=True, slots=True)
class MegatronHome:
    """Where a model lives."""

    device: torch.device
    groups: MegatronGroups
    rank: int
    clock: Clock
    logits: int = LOGITS
    """how many exist at once"""


class MegatronTrainee:
    """A model of `state`; without `adam` it is frozen and only scores. Building it needs no collective."""

    def __init__(self, state: State, place: MegatronHome, adam: Adam | None) -> None:
        if state.adapter is not None:
            raise BadConfiguration("megatron trains whole models, not adapters; use torch:dN for LoRA")
        self.arch = architecture(state.assets)
        self._place, groups = place, place.groups
        check(self.arch, groups.layout)
        check_state(self.arch, state.weights)
        self.model = PackedGPT(self.arch, groups.layout, place.device)
        for name, parameter in self.model.named_parameters():
            fill(parameter.data, pieces(self.arch, groups.layout, groups.place, name), state.weights)
        self.model.to(place.device)
        self.steps = state.step
        self._assets, self._seed = state.assets, state.seed
        self._optimizer: Optimizer | None = None
        self._wrapped: torch.nn.Module = self.model
        if adam is None:
            self.model.requires_grad_(False)
            self.model.train(False)
        else:
            self._wrap(adam, state)

    def _wrap(self, adam: Adam, state: State) -> None:
        config, groups = self.model.config, self._place.groups
        ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True, grad_reduce_in_fp32=True, average_in_collective=False
            ),
            self.model,
        )
        self._optimizer = Optimizer(ddp, adam, groups)
        if state.moments:
            self._optimizer.load(
                {
                    name: pieces(self.arch, groups.layout, groups.place, name)
                    for name, _ in self.model.named_parameters()
                },
                state,
            )
        config.no_sync_func = ddp.no_sync
        # The loss is divided by the denominator already: no count of tokens, no second division.
        config.finalize_model_grads_func = lambda models, _count=None, **rest: finalize_model_grads(
            models, None, **rest
        )
        self._wrapped = ddp

    # ---- forward passes

    def score(
        self, micros: Sequence[MicroBatch], measure: Callable[[MicroBatchRun], torch.Tensor]
    ) -> list[torch.Tensor]:
        """What each micro-batch's run says, on the last pipeline stage; empty elsewhere. No gradient."""
        outputs: list[torch.Tensor] = []

        def end(feed: Feed, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
            outputs.append(measure(self._outcome(feed, output, None)))
            return output.sum(), torch.zeros((), dtype=torch.int), {}

        with torch.no_grad():
            self._flow(micros, end, forward_only=True)
        return outputs

    def _outcome(
        self, feed: Feed, output: torch.Tensor, teacher_rows: Callable[[], tuple[torch.Tensor, Rows]] | None
    ) -> MicroBatchRun:
        group, limit = self._place.groups.context, self._place.logits
        return MicroBatchRun(
            feed.batch, output, self.model.logits, limit, feed.counts, group, self.arch.vocabulary, teacher_rows
        )

    def _flow(self, micros: Sequence[MicroBatch], end: Callable[..., object], *, forward_only: bool) -> None:
        """Megatron's schedule over `micros`; `end(fed, output)` closes each on the last stage."""
        place, groups = self._place, self._place.groups
        feeds = [feed(micro.to(place.device), groups.layout, groups.part) for micro in micros]

        def forward(source: Iterator[Feed], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., object]]:
            feed = next(source)
            with place.clock.phase("forward"):
                self.model.prepare(feed.positions[0], feed.rows)
                output = model(feed.tokens, feed.positions, feed.mask)
            return output, lambda final: self._close(end, feed, final)

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(feeds),
            model=[self._wrapped],
            num_microbatches=len(feeds),
            seq_length=1,  # the widths of micro-batches differ; stages tell each other
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _close(self, end: Callable[..., object], feed: Feed, output: torch.Tensor) -> object:
        with self._place.clock.phase("forward"):
            return end(feed, output)

    # ---- the step

    def step(
        self,
        micros: Sequence[MicroBatch],
        algorithm: Algorithm,
        denominator: float,
        lr: float,
        total: Callable[[Sequence[float]], list[float]],
        teacher: MegatronTrainee | None,
    ) -> StepResult:
        """One optimizer step; `total` adds values up over the ranks."""
        if self._optimizer is None:
            raise NotFormed("this model is frozen: hold it only to score, load what shall learn")
        seed_step(self._seed, self.steps, self._place.rank)
        clock, groups = self._place.clock, self._place.groups
        totals = dict.fromkeys(algorithm.measures, 0.0)
        losses: list[float] = []
        teacher_rows = self._teacher_rows(teacher, micros)

        def end(feed: Feed, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
            run = self._outcome(feed, output, teacher_rows and partial(teacher_rows, len(losses)))
            loss_sum, sums = algorithm.evaluate(run)
            losses.append(float(loss_sum.detach()))
            for name in totals:
                totals[name] += float(sums[name])
            return loss_sum / denominator, torch.zeros((), dtype=torch.int), {}

        self._optimizer.zero()
        with clock.phase("backward"):
            self._flow(micros, end, forward_only=False)
        with clock.phase("optimizer"):
            square_sum = self._optimizer.squared_norm()
        numbers = [math.fsum(losses), *totals.values()]
        square_sum, loss, *measures = total([square_sum, *(numbers if groups.counts else [0.0] * len(numbers))])
        norm = math.sqrt(square_sum) if square_sum >= 0 else math.nan
        loss /= denominator
        was_applied = math.isfinite(norm) and math.isfinite(loss)
        if was_applied:
            with clock.phase("optimizer"):
                self._optimizer.apply(norm, lr)
            self.steps += 1
        return StepResult(
            loss=loss,
            grad_norm=norm,
            sums=dict(zip(totals, measures, strict=True)),
            applied=was_applied,
            tokens=sum(micro.length for micro in micros),
            samples=sum(micro.samples for micro in micros),
        )

    def _teacher_rows(
        self, teacher: MegatronTrainee | None, micros: Sequence[MicroBatch]
    ) -> Callable[[int], tuple[torch.Tensor, Rows]] | None:
        """What the teacher's head gets of each micro-batch, and its head. Found before the step, since a pipeline
        cannot turn aside."""
        if teacher is None:
            return None
        outputs = teacher.score(micros, lambda outcome: outcome.output)
        return lambda index: (outputs[index], teacher.model.logits)

    # ---- the state

    def gather(self) -> State | None:
        """The full state on rank 0, None elsewhere."""
        slots: dict[str, Callable[[torch.nn.Parameter], torch.Tensor]] = {"": lambda parameter: parameter.data}
        if self._optimizer is not None and self.steps:
            for slot in ("exp_avg", "exp_avg_sq"):
                slots[slot] = self._optimizer.reader(slot)
        tensors = {
            slot: collect(self.arch, self._place.groups, self.model, read, self._place.rank)
            for slot, read in slots.items()
        }
        if self._place.rank != 0:
            return None
        weights = tensors.pop("")
        return State(weights, self._assets, tensors, self.steps, self._seed)
