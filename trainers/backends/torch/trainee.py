"""One model of the torch backend: its parameters, and its optimizer unless it is frozen.

The optimizer works on this rank's shards as plain tensors that share memory with FSDP's: AdamW is elementwise, so
nothing is lost and no DTensor is dispatched. Gradients arrive summed; the one division is in the loss. A step
exchanges, besides FSDP's own collectives, one vector: squared gradient norm, loss, the algorithm's measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

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
from millrace.trainers.backends.torch.host_copy import HostCopy
from millrace.trainers.backends.torch.memory import probe
from millrace.trainers.backends.torch.passes import Passes
from millrace.trainers.batches.packing import MicroBatch
from millrace.trainers.errors import NotFormed
from millrace.trainers.phase_clock import COLLECTIVES
from millrace.trainers.weights.model_class import vocabulary_of
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
        self.fusion = next(chunk.fusion for chunk in chunks.values())
        compiles = self.fusion != "none" and place.device.type == "cuda"
        self.passes = Passes(models, context, pipe, unit, place.device, place.compute, clock, compiles)
        self.steps = state.step
        self._assets, self._seed, self._constants = state.assets, state.seed, state.constants
        self._adapter = state.adapter
        self._base = state.weights if state.adapter is not None and place.groups.rank == 0 else {}
        self._shards: list[torch.nn.Parameter] = []
        self._optimizer: torch.optim.AdamW | None = None
        self._copy: HostCopy | None = None
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
            on_card = any(shard.is_cuda for shard in self._shards)
            if self._place.copies:
                for copy, shard in zip(self._learning(), self._shards, strict=True):
                    copy.register_post_accumulate_grad_hook(partial(self._widen, shard))
        optimizer = torch.optim.AdamW(
            self._shards,
            betas=adam.betas,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            foreach=False,
            fused=on_card,
        )
        if state.moments:
            for parameter, shard in zip(self._parameters, self._shards, strict=True):
                box = parameter.box(self._place.groups.grid, self._place.groups.rank)
                optimizer.state[shard] = {
                    "step": torch.tensor(float(state.step), device=shard.device),
                    **{
                        slot: take(moments[parameter.name], box).to(shard.device, copy=True).view_as(shard)
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
        clock = self._place.clock
        parts: list[list[torch.Tensor | float]] = []  # read at the end, so that a GPU is not waited for

        def evaluate(run: Run) -> torch.Tensor:
            loss_sum, sums = algorithm.evaluate(run)
            parts.append([loss_sum.detach(), *(sums[name] for name in algorithm.measures)])
            return loss_sum / denominator

        self.passes.learn(micros, evaluate, teacher.passes if teacher else None)
        with clock.phase("optimizer"):
            square_sum = self._collect_gradients()
        columns = zip(*parts, strict=True) if parts else [[0.0]] * (1 + len(algorithm.measures))
        numbers = [sum(map(float, column)) for column in columns]
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
            sums=dict(zip(algorithm.measures, measures, strict=True)),
            applied=was_applied,
            tokens=sum(micro.length for micro in micros),
            samples=sum(micro.samples for micro in micros),
        )

    def _widen(self, shard: torch.nn.Parameter, parameter: torch.Tensor) -> None:
        """Adds a gradient of a bf16 copy up in fp32, where its master is, as soon as it is whole; FSDP does so
        itself."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            wide = gradient.to(shard.device, torch.float32)
            shard.grad = wide if shard.grad is None else shard.grad.add_(wide)

    def _collect_gradients(self) -> float:
        """Hands FSDP's summed gradients to the shards. This rank's part of the squared norm, in float64: of what it
        owns."""
        total = torch.zeros((), dtype=torch.float64, device=self._shards[0].device)
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
            self.guard()
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
        return [tensor for tensor in tensors if tensor.device.type == self._place.device.type]

    @property
    def learns(self) -> bool:
        """Whether it has an optimizer."""
        return self._optimizer is not None

    @property
    def moments_to_come(self) -> int:
        """Bytes that the first step will take on the device for moments."""
        if self._optimizer is None or self._optimizer.state:
            return 0
        return sum(2 * shard.numel() * shard.element_size() for shard in self._shards if shard.is_cuda)

    def peak_memory(self, tokens: int, longest: int) -> int:
        """Bytes that a forward and backward pass of so many tokens takes on a GPU, gradients included, which are
        dropped, after an OutOfMemoryError too. longest: tokens of a sample at most. All ranks call it."""
        micro = probe(tokens, vocabulary_of(self.model.config), longest)
        torch.cuda.reset_peak_memory_stats(self._place.device)
        before = torch.cuda.memory_allocated(self._place.device)
        try:
            self.passes.learn([micro], lambda run: run.tokens(1.0)[0].sum(), None)
            return torch.cuda.max_memory_allocated(self._place.device) - before
        finally:
            for parameter in [*self._learning(), *self._shards]:
                parameter.grad = None

    def guard(self) -> None:
        """Before weights or moments change, or leave their place: what was gathered last is copied first."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.guard()

    def begin_gather(self) -> Callable[[], State] | None:
        """See the seam."""
        self.guard()
        slots = {"": [shard.detach() for shard in self._shards]}
        if self._optimizer is not None and self._optimizer.state:
            for slot in ("exp_avg", "exp_avg_sq"):
                slots[slot] = [self._optimizer.state[shard][slot] for shard in self._shards]
        names = [parameter.name for parameter in self._parameters]
        groups, device = self._place.groups, self._place.device
        if groups.grid.world == 1:
            with self._place.clock.phase("copy"):
                self._copy = copy = HostCopy([shard for shards in slots.values() for shard in shards])
            copies = iter(copy.copies)
            state = self._state({slot: {name: next(copies) for name in names} for slot in slots})

            def finish() -> State:
                copy.wait()
                return state

            return finish
        by_slot = {}
        with self._place.clock.phase(COLLECTIVES):
            parameters = everywhere(groups, self._by_stage)
            for slot, shards in slots.items():
                by_slot[slot] = gather(groups, device, parameters, dict(zip(names, shards, strict=True)))
        if groups.rank != 0:
            return None
        state = self._state(by_slot)
        return lambda: state

    def _state(self, by_slot: dict[str, dict[str, torch.Tensor]]) -> State:
        weights = by_slot.pop("")
        if self._adapter is not None:
            adapter = replace(self._adapter, weights=weights)
            return State(
                self._base, self._assets, by_slot, self.steps, self._seed, adapter=adapter, constants=self._constants
            )
        return State(weights, self._assets, by_slot, self.steps, self._seed, constants=self._constants)
