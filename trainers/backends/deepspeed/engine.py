"""One model in a DeepSpeed engine.

    forward, backward of each micro-batch      loss x ranks / denominator, as DeepSpeed takes means over the ranks
    -> the last one's backward                 sums the gradients over micro-batches and ranks
    -> engine.step                             norm, clip, AdamW on this rank's pieces, weights back to all

The arithmetic is torch's: its AdamW on fp32 masters. A rank with a non-finite loss poisons its gradient, so the norm of
all ranks is what decides whether a step is applied. ZeRO-0 has no norm in fp32 and clips with one that lets a NaN pass,
so there both are done here.

Making the engine exchanges bytes, so it is made at its first use, which all ranks share; what can fail alone (a
checkpoint that does not fit) fails before, in the constructor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from millrace.schemas.json_values import JsonObject
from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.backends.base import Adam, StepResult
from millrace.trainers.backends.deepspeed.shards import WEIGHT, Shards
from millrace.trainers.backends.group import RankGroup
from millrace.trainers.backends.models.build import build, narrow_tables
from millrace.trainers.backends.models.forward import ForwardPass
from millrace.trainers.backends.seeding import seed_step
from millrace.trainers.batches.packing import MicroBatch
from millrace.trainers.errors import BadConfiguration
from millrace.trainers.phase_clock import COLLECTIVES, Clock
from millrace.trainers.weights.state import State


@dataclass(frozen=True, slots=True)
class Zero:
    """ZeRO's constants. stage: 0 replicates all, 1 cuts Adam's moments over the ranks, 2 the gradients too, 3 the
    weights too. offload: moments and fp32 weights live on the CPU (1 to 3). bf16: forward and backward in bf16, fp32
    weights and sums (2 and 3). bucket: elements that one reduction moves."""

    stage: int = 1
    offload: bool = False
    bf16: bool = False
    bucket: int = 16 * 2**20

    def check(self) -> None:
        """BadConfiguration, with the reason, for what cannot be."""
        if self.stage not in range(4):
            raise BadConfiguration(f"ZeRO has stages 0 to 3, not {self.stage}")
        if self.offload and self.stage == 0:
            raise BadConfiguration("ZeRO 0 keeps everything in place; offload from stage 1 on")
        if self.bf16 and self.stage < 2:
            raise BadConfiguration(f"bf16 needs ZeRO 2 or 3, not {self.stage}: below, DeepSpeed sums gradients in bf16")

    def settings(self, clip: float) -> JsonObject:
        """As DeepSpeed's configuration has it."""
        zero: JsonObject = {
            "stage": self.stage,
            "reduce_bucket_size": self.bucket,
            "allgather_bucket_size": self.bucket,
            "overlap_comm": False,
        }
        if self.stage == 3:
            zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": self.bucket}
            # It would replace torch's linear for good, in the processes that ever ran stage 3: gradients then come in
            # another order there than in their peers, and stage 2, which adds them up in that order, mixes them up.
            zero["memory_efficient_linear"] = False
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        config: JsonObject = {
            "train_micro_batch_size_per_gpu": 1,  # ours are packed; DeepSpeed only counts samples with it
            "gradient_accumulation_steps": 1,  # we say where a minibatch ends
            "gradient_clipping": 0.0 if self.stage == 0 else clip,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # torch's AdamW everywhere
            "zero_optimization": zero,
        }
        if self.bf16:
            config |= {
                "bf16": {"enabled": True, "check_grad_overflow": True},
                "data_types": {"grad_accum_dtype": "fp32"},
                "communication_data_type": "fp32",
            }
        return config


class _WholeModel(torch.nn.Module):
    """An engine's forward pass and nothing else of it: DeepSpeed's hooks want the model, its head included, in one."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._run = [engine]  # in a list: not a part of this module

    @property
    def behind(self) -> torch.nn.Module:
        """The transformers model."""
        model: torch.nn.Module = self._run[0].module
        return model

    def forward(self, **inputs: object) -> object:
        return self._run[0](**inputs)


class ZeroEngine:
    """A model of `state` that learns. Building it needs no collective; its first use does."""

    def __init__(
        self, state: State, adam: Adam, zero: Zero, group: RankGroup, device: torch.device, clock: Clock, deepspeed: Any
    ) -> None:
        self._adam, self._zero, self._group, self._device, self._clock = adam, zero, group, device, clock
        self._deepspeed = deepspeed
        self._model = build(state.assets, state.tensors)
        if zero.bf16:
            narrow_tables(self._model)
        self._shapes = {name: parameter.shape for name, parameter in self._model.named_parameters()}
        self.config = self._model.config
        self._state: State | None = state
        self._assets, self._seed, self.steps = state.assets, state.seed, state.step
        self._constants = state.constants
        self._engine: Any = None
        self._shards: Shards | None = None

    # ---- the engine

    def start(self) -> None:
        """Makes the engine, unless it runs. All ranks call it together."""
        if self._engine is not None or self._state is None:
            return
        adam, state = self._adam, self._state
        optimizer = torch.optim.AdamW(
            self._model.parameters(), betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay, foreach=False
        )
        with self._clock.phase(COLLECTIVES):
            self._engine, *_ = self._deepspeed.initialize(
                model=self._model,
                model_parameters=list(self._model.parameters()),
                optimizer=optimizer,
                config=self._zero.settings(adam.clip),
            )
        self._shards = Shards(self._engine, self._zero.stage, self._group.rank, self._shapes)
        if self._zero.bf16:
            self._shards.write_weights(state.weights)
        if state.moments:
            self._shards.write_moments(state.moments, state.step)
        self._state = None  # free the full tensors

    def close(self) -> None:
        """Lets go of the process group and of all tensors. ZeRO-3 leaves references to itself behind in autograd, where
        no collector looks: what they reach is emptied."""
        if self._engine is not None:
            self._engine.destroy()
            if self._zero.stage == 3:
                zero = self._engine.optimizer
                offload = zero.parameter_offload
                for part in (*self._model.parameters(), *self._model.modules(), offload, zero, self._engine):
                    vars(part).clear()
        self._engine = self._shards = self._state = None

    @property
    def model(self) -> torch.nn.Module:
        """What learns."""
        return self._model

    def passes(self, micro: MicroBatch, teacher: torch.nn.Module | None = None) -> ForwardPass:
        """A forward pass of `micro` on this model."""
        self.start()
        return ForwardPass(_WholeModel(self._engine), micro.to(self._device), teacher)

    # ---- the step

    def step(
        self,
        micros: Sequence[MicroBatch],
        algorithm: Algorithm,
        denominator: float,
        lr: float,
        total: Callable[[Sequence[float]], list[float]],
        teacher: torch.nn.Module | None,
    ) -> StepResult:
        """One optimizer step; `total` adds values up over the ranks."""
        self.start()
        seed_step(self._seed, self.steps, self._group.rank)
        totals = dict.fromkeys(algorithm.measures, 0.0)
        loss = 0.0
        for index, micro in enumerate(micros):
            self._engine.set_gradient_accumulation_boundary(index == len(micros) - 1)
            with self._clock.phase("forward"):
                loss_sum, sums = algorithm.evaluate(self.passes(micro, teacher))
            value = float(loss_sum.detach())
            share = self._group.world / denominator if math.isfinite(value) else math.nan
            with self._clock.phase("backward"):
                self._engine.backward(loss_sum * share)
            loss += value
            for name in totals:
                totals[name] += float(sums[name])
        loss, *measures = total([loss, *totals.values()])
        for settings in self._engine.optimizer.param_groups:
            settings["lr"] = lr
        with self._clock.phase("optimizer"):
            norm, was_applied = self._alone(total) if self._zero.stage == 0 else self._together()
        self.steps += was_applied
        return StepResult(
            loss=loss / denominator,
            grad_norm=norm,
            sums=dict(zip(totals, measures, strict=True)),
            applied=was_applied,
            tokens=sum(micro.length for micro in micros),
            samples=sum(micro.samples for micro in micros),
        )

    def _together(self) -> tuple[float, bool]:
        self._engine.step()
        return float(self._engine.get_global_grad_norm()), bool(self._engine.was_step_applied())

    def _alone(self, total: Callable[[Sequence[float]], list[float]]) -> tuple[float, bool]:
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        square_sum = sum(float(torch.linalg.vector_norm(gradient).double() ** 2) for gradient in gradients)
        norm = math.sqrt(total([square_sum / self._group.world])[0])
        if not math.isfinite(norm):
            self._engine.zero_grad()
            return norm, False
        scale = min(1.0, self._adam.clip / (norm + 1e-6))
        for gradient in gradients:
            gradient.mul_(scale)
        self._engine.step()
        return norm, True

    # ---- the state

    def gather(self) -> State | None:
        """The full state on rank 0, None elsewhere. All ranks call it."""
        self.start()
        if self._shards is None:
            return None
        with self._clock.phase(COLLECTIVES):
            tensors = self._shards.gather(self._shards.slots)
        if self._group.rank != 0:
            return None
        weights = tensors.pop(WEIGHT)
        return State(weights, self._assets, tensors, self.steps, self._seed, constants=self._constants)
