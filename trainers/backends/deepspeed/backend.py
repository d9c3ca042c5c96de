"""DeepSpeed: ZeRO 0 to 3 with data parallelism, over gloo or, on CUDA, NCCL.

The policy and its critic are one engine each; frozen models are whole on every rank and never enter DeepSpeed.
`load` checks and builds the models alone; the engines, whose making exchanges bytes, are made at the first use that all
ranks share (score, values, step or gather). Weights are never built inside `zero.Init`, which cuts parameters before
they are initialised.

Invariant of this sibling: a process group ends with every engine that knew it. DeepSpeed would clone the group, with
sockets of the clone's own that nobody could close; it is handed the group itself instead.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store
from transformers import PreTrainedModel

from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.backends.base import Adam, Backend, StepResult
from millrace.trainers.backends.deepspeed.engine import Zero, ZeroEngine
from millrace.trainers.backends.devices import on_gpu
from millrace.trainers.backends.group import RankGroup, check
from millrace.trainers.backends.layout import ACTOR, CRITIC, DEEPSPEED, TEACHER, Layout
from millrace.trainers.backends.models.build import build, inference_mode
from millrace.trainers.backends.models.forward import ForwardPass
from millrace.trainers.backends.models.rows import has_rows
from millrace.trainers.backends.seeding import repeatable
from millrace.trainers.batches.packing import MicroBatch
from millrace.trainers.errors import BadConfiguration, NotFormed
from millrace.trainers.phase_clock import Clock
from millrace.trainers.private_apis.deepspeed import disable_shared_memory, forget_engines, lend_world, release_groups
from millrace.trainers.weights.model_class import context_length, vocabulary_of
from millrace.trainers.weights.state import State


class DeepSpeedBackend(Backend):
    """See the seam. stage, offload, bf16: see `Zero`. `device`: cpu or cuda, chosen by what there is when None.
    BadConfiguration where DeepSpeed is not installed, or cannot do what is asked."""

    def __init__(
        self,
        adam: Adam | None = None,
        *,
        parallel: Layout | None = None,
        stage: int = 1,
        offload: bool = False,
        bf16: bool = False,
        device: str | None = None,
        deterministic: bool = True,
    ) -> None:
        self.adam = adam or Adam()
        self.parallel = parallel or Layout(DEEPSPEED)
        if self.parallel.backend != DEEPSPEED:
            raise BadConfiguration(f"{self.parallel} is no layout of DeepSpeed; write {DEEPSPEED}:d{self.parallel.d}")
        self.parallel.check()
        self.zero = Zero(stage, offload, bf16)
        self.zero.check()
        self.cuda = on_gpu(device)
        self.clock = Clock(torch.cuda.synchronize) if self.cuda else Clock()
        self.device = torch.device("cpu")
        self._deepspeed = _import(self.cuda)
        self._deterministic = deterministic
        self._group = RankGroup(self.clock, cuda=self.cuda)
        self._engines: dict[str, ZeroEngine] = {}
        self._frozen: dict[str, PreTrainedModel] = {}

    @property
    def kernels(self) -> dict[str, str]:
        return {"repeatable": str(self._deterministic).lower()}

    # ---- the group

    def form(self, rank: int, world: int, store: Store | None, timeout: float) -> None:
        check(rank, world, store)
        self.tear_down()
        repeatable(self._deterministic)
        local = 0
        if self.cuda:
            local = (self.first + rank) % torch.cuda.device_count()
            self.device = torch.device("cuda", local)
            torch.cuda.set_device(self.device)
        os.environ["LOCAL_RANK"] = str(local)  # DeepSpeed has no other way to be told its device
        self._group.join(rank, world, store, timeout)
        self._deepspeed.init_distributed("nccl" if self.cuda else "gloo", dist_init_required=False, verbose=False)
        lend_world(self._deepspeed)
        self.rank, self.world, self.layout = rank, world, str(self.parallel.within(world))

    def abort(self) -> None:
        self._group.abort()

    def tear_down(self) -> None:
        self._group.abort()
        self._forget()
        if self._group.formed:
            release_groups(self._deepspeed)
        self._group.leave()
        self.rank, self.world, self.layout = 0, 1, ""

    def _forget(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines, self._frozen = {}, {}
        forget_engines()

    def sum(self, values: Sequence[float]) -> list[float]:
        return self._group.sum(values)

    def max(self, values: Sequence[float]) -> list[float]:
        return self._group.max(values)

    def announce(self, message: bytes | None) -> bytes:
        return self._group.announce(message)

    # ---- the models

    def load(self, state: State) -> None:
        if not self._group.formed:
            raise NotFormed("no group yet; call form, then load")
        self._forget()
        self._engines[ACTOR] = self._engine(state)
        if state.critic is not None:
            self._engines[CRITIC] = self._engine(state.critic)

    def hold(self, role: str, state: State) -> None:
        model = build(state.assets, state.tensors)
        torch.nn.Module.to(model, self.device)
        model.requires_grad_(False)
        model.train(False)
        self._frozen[role] = model

    def _engine(self, state: State) -> ZeroEngine:
        return ZeroEngine(state, self.adam, self.zero, self._group, self.device, self.clock, self._deepspeed)

    def _learner(self, role: str) -> ZeroEngine:
        if role in self._frozen:
            raise NotFormed("this model is frozen: hold it only to score, load what shall learn")
        if role not in self._engines:
            raise NotFormed(f"no {role} yet; call form, then load" if role == ACTOR else f"no {role}: load or hold one")
        return self._engines[role]

    def _passes(self, role: str, micro: MicroBatch) -> ForwardPass:
        if role in self._frozen:
            return ForwardPass(self._frozen[role], micro.to(self.device))
        return self._learner(role).passes(micro)

    def _models(self, role: str) -> list[torch.nn.Module]:
        return [] if role in self._frozen else [self._learner(role).model]

    @property
    def steps(self) -> int:
        return self._learner(ACTOR).steps

    @property
    def vocabulary(self) -> int:
        return vocabulary_of(self._learner(ACTOR).config)

    @property
    def longest(self) -> int:
        return context_length(self._learner(ACTOR).config)

    @property
    def fills_rows(self) -> bool:
        return has_rows(self._learner(ACTOR).model)

    # ---- the step

    def score(self, micros: Sequence[MicroBatch], temperature: float, role: str = ACTOR) -> list[torch.Tensor]:
        with self.clock.phase("forward"), inference_mode(self._models(role)):
            return [self._passes(role, micro).tokens(temperature)[0].cpu() for micro in micros]

    def values(self, micros: Sequence[MicroBatch], role: str = CRITIC) -> list[torch.Tensor]:
        with self.clock.phase("forward"), inference_mode(self._models(role)):
            return [self._passes(role, micro).values().cpu() for micro in micros]

    def step(
        self, micros: Sequence[MicroBatch], algorithm: Algorithm, denominator: float, lr: float, role: str = ACTOR
    ) -> StepResult:
        learner = self._learner(role)
        return learner.step(micros, algorithm, denominator, lr, self.sum, self._frozen.get(TEACHER))

    def gather(self) -> State | None:
        state = self._learner(ACTOR).gather()
        if CRITIC not in self._engines:
            return state
        critic = self._engines[CRITIC].gather()
        return None if state is None else replace(state, critic=critic)


def _import(cuda: bool) -> Any:
    if not cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"  # read once, at import
    # DeepSpeed 0.19 calls torch's collectives by their former names
    warnings.filterwarnings("ignore", message="`torch.distributed.*is deprecated", category=FutureWarning)
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise BadConfiguration(
            "DeepSpeed is not installed: run `make setup`, elsewhere `pip install -e '.[backends]'`, or use a torch: "
            "layout"
        ) from error
    disable_shared_memory(deepspeed)
    return deepspeed
