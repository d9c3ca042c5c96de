"""One model of the torch backend: its parameters, and its optimizer unless it is frozen.

The optimizer works on this rank's shards as plain tensors that share memory with FSDP's: AdamW is elementwise, so
nothing is lost and no DTensor is dispatched. Gradients arrive summed; the one division is in the loss. A step
exchanges, besides FSDP's own collectives, one vector: squared gradient norm, loss, the algorithm's measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from millrace.trainers.algorithms.base import Algorithm, Run
from millrace.trainers.backends.base import Adam, StepResult
from millrace.trainers.backends.models.stages import ONE_STAGE
from millrace.trainers.backends.parallel.context import context_of
from millrace.trainers.backends.parallel.gathering import everywhere, gather
from millrace.trainers.backends.parallel.grid import CP, DP, FS, TP
from millrace.trainers.backends.parallel.pipeline import pipe_of
from millrace.trainers.backends.parallel.regions import take
from millrace.trainers.backends.seeding import seed_step
from millrace.trainers.backends.torch.chunk import Home, make
from millrace.trainers.backends.torch.passes import Passes
from millrace.trainers.batches.packing import MicroBatch
from millrace.trainers.errors import NotFormed
from millrace.trainers.phase_clock import COLLECTIVES
from millrace.trainers.weights.state import State


class Trainee:
    """A model of `state`; without `adam` it is frozen and only scores. Building it needs no collective."""

    def __init__(self, state: State, place: Home, adam: Adam | None) -> None:
        self._place = place
        self._adam = adam
        groups, clock = place.groups, place.clock
        context, pipe = context_of(groups, clock), pipe_of(groups, place.schedule, clock)
        chunks = {
            stage.index: make(state, stage, place, learns=adam is not None)
            for stage in (pipe.own_stages if pipe else [ONE_STAGE])
        }
        self._by_stage = {index: chunk.shards for index, chunk in chunks.items()}
        self._parameters = [parameter for chunk in chunks.values() for parameter in chunk.shards]
        masters = [tensor for chunk in chunks.values() for tensor in chunk.masters]
        unit = groups.size(CP) * groups.size(TP)
        models = [chunk.model for chunk in chunks.values()]
        self.passes = Passes(models, context, pipe, unit, place.device, place.compute, clock)
        self.steps = state.step
        self._assets, self._seed, self._constants = state.assets, state.seed, state.constants
        self._adapter = state.adapter
        self._base = state.weights if state.adapter is not None and place.groups.rank == 0 else {}
        self._shards: list[torch.nn.Parameter] = []
        self._optimizer: torch.optim.AdamW | None = None
        if adam is not None:
            self._optimizer = self._optimize(adam, state, masters)

    @property
    def model(self) -> PreTrainedModel:
        """The whole model, or this rank's first stage of it."""
        return self.passes.chunks[0]

    def _optimize(self, adam: Adam, state: State, masters: Sequence[torch.Tensor]) -> torch.optim.AdamW:
        with torch.no_grad():
            tensors = masters or [p.to_local() if isinstance(p, DTensor) else p.data for p in self._learning()]
            self._shards = [torch.nn.Parameter(tensor) for tensor in tensors]
        optimizer = torch.optim.AdamW(
            self._shards, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay, foreach=False
        )
        if state.moments:
            for parameter, shard in zip(self._parameters, self._shards, strict=True):
                box = parameter.box(self._place.groups.grid, self._place.groups.rank)
                optimizer.state[shard] = {
                    "step": torch.tensor(float(state.step)),
                    **{
                        slot: take(moments[parameter.name], box).to(self._place.device, copy=True).view_as(shard)
                        for slot, moments in state.moments.items()
                    },
                }
        return optimizer

    def _learning(self) -> list[torch.nn.Parameter]:
        """The parameters that learn: all of them, or an adapter's."""
        return [p for model in self.passes.chunks for p in model.parameters() if p.requires_grad]

    # ---- the step

    def step(
        self,
        micros: Sequence[MicroBatch],
        algorithm: Algorithm,
        denominator: float,
        lr: float,
        total: Callable[[Sequence[float]], list[float]],
        teacher: Trainee | None,
    ) -> StepResult:
        """One optimizer step; `total` adds values up over all ranks, copies in a cell too."""
        if self._optimizer is None:
            raise NotFormed("this model is frozen: hold it only to score, load what shall learn")
        seed_step(self._seed, self.steps, self._place.groups.index(DP))
        totals = dict.fromkeys(algorithm.measures, 0.0)
        clock, loss = self._place.clock, 0.0

        def evaluate(run: Run) -> torch.Tensor:
            nonlocal loss
            loss_sum, sums = algorithm.evaluate(run)
            loss += float(loss_sum.detach())
            for name in totals:
                totals[name] += float(sums[name])
            return loss_sum / denominator

        self.passes.learn(micros, evaluate, teacher.passes if teacher else None, self._widen_gradients)
        with clock.phase("optimizer"):
            square_sum = self._collect_gradients()
        numbers = [loss, *totals.values()]
        if not self._place.groups.grid.tells(self._place.groups.rank):
            numbers = [0.0] * len(numbers)
        square_sum, loss, *measures = total([square_sum, *numbers])
        norm = math.sqrt(square_sum) if square_sum >= 0 else math.nan
        loss /= denominator
        was_applied = math.isfinite(norm) and math.isfinite(loss)
        with clock.phase("optimizer"):
            self._apply(norm, lr, was_applied)
        return StepResult(
            loss=loss,
            grad_norm=norm,
            sums=dict(zip(totals, measures, strict=True)),
            applied=was_applied,
            tokens=sum(micro.length for micro in micros),
            samples=sum(micro.samples for micro in micros),
        )

    def _widen_gradients(self) -> None:
        """Adds what a model of bf16 copies has up in fp32; FSDP does so itself."""
        if not self._place.copies:
            return
        for parameter, shard in zip(self._learning(), self._shards, strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                shard.grad = gradient.float() if shard.grad is None else shard.grad.add_(gradient)

    def _collect_gradients(self) -> float:
        """Hands FSDP's summed gradients to the shards. This rank's part of the squared norm, in float64: of what it
        owns."""
        total = torch.zeros((), dtype=torch.float64, device=self._place.device)
        grid, rank = self._place.groups.grid, self._place.groups.rank
        with torch.no_grad():
            for parameter, shard in zip(self._learning(), self._shards, strict=True):
                gradient = shard.grad if parameter.grad is None else parameter.grad
                parameter.grad = None
                if gradient is None:
                    shard.grad = torch.zeros_like(shard)
                    continue
                shard.grad = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            self._add_copies()
            for entry, shard in zip(self._parameters, self._shards, strict=True):
                if shard.grad is not None and entry.owned_by(grid, rank):
                    total += torch.linalg.vector_norm(shard.grad).double() ** 2
        return float(total)

    def _add_copies(self) -> None:
        """Tensor peers hold copies of what they do not cut, and each has the gradient of its own positions."""
        if self._place.groups.size(TP) == 1:
            return
        copies = [
            shard.grad
            for parameter, shard in zip(self._parameters, self._shards, strict=True)
            if parameter.cuts == ((FS, 0),) and shard.grad is not None
        ]
        flat = torch.cat([gradient.reshape(-1) for gradient in copies])
        with self._place.clock.phase(COLLECTIVES):
            dist.all_reduce(flat, group=self._place.groups.by_axis[TP])
        for gradient, total in zip(copies, flat.split([gradient.numel() for gradient in copies]), strict=True):
            gradient.copy_(total.view_as(gradient))

    def _apply(self, norm: float, lr: float, is_finite: bool) -> None:
        if self._optimizer is not None and self._adam is not None and is_finite:
            scale = min(1.0, self._adam.clip / (norm + 1e-6))
            for shard in self._shards:
                if shard.grad is not None:
                    shard.grad.mul_(scale)
            for settings in self._optimizer.param_groups:
                settings["lr"] = lr
            self._optimizer.step()
            self.steps += 1
            self._copy_masters()
        for shard in self._shards:
            shard.grad = None

    def _copy_masters(self) -> None:
        if self._place.copies:
            with torch.no_grad():
                for parameter, shard in zip(self._learning(), self._shards, strict=True):
                    parameter.copy_(shard)

    # ---- the state

    def resident(self) -> list[torch.Tensor]:
        """Every tensor that outlives a step: weights and what the optimizer keeps of them. Frees what FSDP gathered."""
        tensors: list[torch.Tensor] = [*self._shards]
        for model in self.passes.chunks:
            for unit in model.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()
            tensors += [p.to_local() if isinstance(p, DTensor) else p.data for p in model.parameters()]
        if self._optimizer is not None:
            for moments in self._optimizer.state.values():
                tensors += [tensor for tensor in moments.values() if tensor.dim() > 0]
        return tensors

    def gather(self) -> State | None:
        """The full state on rank 0, None elsewhere."""
        slots = {"": [shard.detach() for shard in self._shards]}
        if self._optimizer is not None and self._optimizer.state:
            for slot in ("exp_avg", "exp_avg_sq"):
                slots[slot] = [self._optimizer.state[shard][slot] for shard in self._shards]
        by_slot = {}
        groups, device = self._place.groups, self._place.device
        with self._place.clock.phase(COLLECTIVES):
            parameters = everywhere(groups, self._by_stage)
            for slot, shards in slots.items():
                parts = {parameter.name: shard for parameter, shard in zip(self._parameters, shards, strict=True)}
                by_slot[slot] = gather(groups, device, parameters, parts)
        if groups.rank != 0:
            return None
        weights = by_slot.pop("")
        if self._adapter is not None:
            adapter = replace(self._adapter, weights=weights)
            return State(
                self._base, self._assets, by_slot, self.steps, self._seed, adapter=adapter, constants=self._constants
            )
        return State(weights, self._assets, by_slot, self.steps, self._seed, constants=self._constants)
