"""torch over gloo, or over NCCL on CUDA: FSDP2, and within a cell of ranks tensor, expert, context and pipeline
parallelism (`parallel/`). A world of one is the plain model without a process group.

Several models may live in one group: the policy, its critic, and frozen ones that only score (`trainee.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
from torch.distributed.distributed_c10d import Store
from transformers import PreTrainedModel

from millrace.trainers.algorithms.base import Algorithm, Run
from millrace.trainers.backends.base import Adam, Backend, StepResult
from millrace.trainers.backends.devices import check_bf16, fitting, on_gpu
from millrace.trainers.backends.group import RankGroup, check, collect
from millrace.trainers.backends.layout import ACTOR, CRITIC, ROLES, TEACHER, TORCH, Layout
from millrace.trainers.backends.models.rows import has_rows
from millrace.trainers.backends.parallel.grid import DP, Grid, Groups
from millrace.trainers.backends.parallel.schedules import ONE_F_ONE_B, chunks_of
from millrace.trainers.backends.seeding import repeatable
from millrace.trainers.backends.torch.chunk import Home
from millrace.trainers.backends.torch.compute import Compute
from millrace.trainers.backends.torch.memory import find_budget
from millrace.trainers.backends.torch.offload import TensorShelf, check_roles
from millrace.trainers.backends.torch.trainee import Trainee
from millrace.trainers.batches.attention import ways_of
from millrace.trainers.batches.packing import MicroBatch
from millrace.trainers.errors import BadConfiguration, NotFormed
from millrace.trainers.phase_clock import Clock
from millrace.trainers.weights.model_class import context_length, vocabulary_of
from millrace.trainers.weights.state import State

DIMENSIONS = "dtpce"
"""along which this backend can split"""


class TorchBackend(Backend):
    """See the seam. `device`: cpu or cuda, chosen by what there is when None. `reshard`: free gathered layers between
    forward and backward (less memory, one more all-gather a layer). `schedule`: of a pipeline, see
    `parallel/schedules.py`. `deterministic`: only algorithms that give the same bytes again. `compute`: number format,
    and what is computed twice to save memory. `offload`: roles whose tensors leave the device between their uses."""

    adapters = True
    shares_prefixes = True

    def __init__(
        self,
        adam: Adam | None = None,
        *,
        parallel: Layout | None = None,
        device: str | None = None,
        reshard: bool = False,
        schedule: str = ONE_F_ONE_B,
        deterministic: bool = True,
        compute: Compute | None = None,
        offload: Sequence[str] = (),
    ) -> None:
        self.adam = adam or Adam()
        self.parallel = parallel or Layout()
        if self.parallel.backend != TORCH or set(self.parallel.split) - set(DIMENSIONS):
            raise BadConfiguration(f"{self.parallel}: the torch backend splits along {', '.join(DIMENSIONS)} only")
        if self.parallel.etp > 1:
            raise BadConfiguration(f"{self.parallel}: the torch backend keeps each expert whole; leave ffn:t out")
        self.cuda = on_gpu(device)
        # of its own stream alone, since what is copied beside the step (`host_copy.py`) is not to be waited for
        self.clock = Clock(lambda: torch.cuda.current_stream().synchronize()) if self.cuda else Clock()
        self.device = torch.device("cpu")
        self._reshard = reshard
        chunks_of(schedule)
        self._schedule = schedule
        self._deterministic = deterministic
        self.compute = self._computing = compute or Compute()
        check_roles(offload, ROLES)
        self.offload = frozenset(offload)
        self._group = RankGroup(self.clock, cuda=self.cuda)
        self._groups = Groups(Grid(), 0)
        self._forget()

    def _forget(self) -> None:
        self._roles: dict[str, Trainee] = {}
        self._shelves: dict[str, TensorShelf] = {}

    # ---- the group

    def form(self, rank: int, world: int, store: Store | None, timeout: float) -> None:
        check(rank, world, store)
        layout = self.parallel.within(world)
        self.tear_down()
        repeatable(self._deterministic)
        if self.cuda:
            self.device = torch.device("cuda", (self.first + rank) % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        if self.compute.bf16:
            check_bf16(self.device)
        self._computing = self.compute.on(self.device)
        if world > 1:
            self._group.join(rank, world, store, timeout, partial(self._split, Grid(layout), rank, timeout))
        self.rank, self.world, self.layout = rank, world, str(layout)

    def _split(self, grid: Grid, rank: int, timeout: float, forming: timedelta) -> None:
        self._groups = Groups.form(grid, rank, self.device, forming, timedelta(seconds=timeout))

    @property
    def data_rank(self) -> int:
        return self._groups.index(DP)

    @property
    def data_world(self) -> int:
        return self._groups.size(DP)

    def abort(self) -> None:
        self._group.abort()

    def tear_down(self) -> None:
        self._group.abort()
        alone = bool(self._roles) and not self._group.formed
        self._forget()
        self._groups = Groups(Grid(), 0)
        self._group.leave()
        if alone:
            collect()
        if self.cuda:
            torch.cuda.empty_cache()
        self.rank, self.world, self.layout = 0, 1, ""

    def sum(self, values: Sequence[float]) -> list[float]:
        return self._group.sum(values if self._groups.grid.leads(self.rank) else [0.0] * len(values))

    def max(self, values: Sequence[float]) -> list[float]:
        return self._group.max(values)

    def announce(self, message: bytes | None) -> bytes:
        return self._group.announce(message)

    # ---- the models

    def load(self, state: State) -> None:
        self._forget()
        self._play(ACTOR, state, self.adam)
        if state.critic is not None:
            self._play(CRITIC, state.critic, self.adam)

    def hold(self, role: str, state: State) -> None:
        self._play(role, state, None)

    def _play(self, role: str, state: State, adam: Adam | None) -> None:
        with fitting(f"the {role}"):
            self._roles[role] = trainee = Trainee(state, self._place, adam)
        if role in self.offload:
            self._shelves[role] = TensorShelf(self.device)
            self._shelves[role].put(trainee.resident())

    @contextmanager
    def _used(self, *roles: str, learns: bool = False) -> Iterator[None]:
        """Inside, these roles are on the device; the first may change. After a failure they stay: nothing is called
        any more but tear_down."""
        idle = [role for role in roles if role in self._shelves]
        for role in idle:
            self._shelves[role].fetch()
        yield
        for role in idle:
            self._roles[role].guard()
            tensors = self._roles[role].resident()
            if learns and role == roles[0]:
                self._shelves[role].put(tensors)
            else:
                self._shelves[role].put_back()

    @property
    def _place(self) -> Home:
        return Home(self.device, self._groups, self.clock, self._reshard, self._computing, self._schedule)

    def _role(self, role: str) -> Trainee:
        if role not in self._roles:
            raise NotFormed(f"no {role} yet; call form, then load" if role == ACTOR else f"no {role}: load or hold one")
        return self._roles[role]

    @property
    def model(self) -> PreTrainedModel:
        """The policy itself, on the device; whole only in a world of 1 (sampling, evaluation)."""
        if ACTOR in self._shelves:
            self._shelves[ACTOR].fetch()
        return self._role(ACTOR).model

    @property
    def steps(self) -> int:
        return self._role(ACTOR).steps

    @property
    def vocabulary(self) -> int:
        return vocabulary_of(self._role(ACTOR).model.config)

    @property
    def longest(self) -> int:
        return context_length(self._role(ACTOR).model.config)

    @property
    def fills_rows(self) -> bool:
        return has_rows(self._role(ACTOR).model)

    @property
    def kernels(self) -> dict[str, str]:
        actor = self._role(ACTOR)
        optimizer = "main memory" if self.compute.optimizer_offload else "fused" if self.cuda else "plain"
        return {
            "attention": "+".join(sorted(ways_of(actor.model))),
            "fusion": actor.fusion,
            "optimizer": optimizer,
            "repeatable": str(self._deterministic).lower(),
        }

    def room(self) -> int | None:
        learners = [trainee for trainee in self._roles.values() if trainee.learns]
        if not self.cuda:
            return None
        with self._used(ACTOR):
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.device)
            to_come = sum(trainee.moments_to_come for trainee in learners)
            actor = self._role(ACTOR)
            measure = partial(actor.peak_memory, longest=self.longest)
            return find_budget(measure, free - to_come, total, alone=self.world == 1)

    def passes(self, micro: MicroBatch) -> Run:
        """A forward pass of the policy, to measure without learning; whole only in a world of 1."""
        for role in (ACTOR, TEACHER):
            if role in self._shelves:
                self._shelves[role].fetch()
        teacher = self._roles.get(TEACHER)
        return self._role(ACTOR).passes.one(micro, teacher=teacher.passes if teacher else None)

    # ---- the step

    def score(self, micros: Sequence[MicroBatch], temperature: float, role: str = ACTOR) -> list[torch.Tensor]:
        trainee = self._role(role)
        with self._used(role), self.clock.phase("forward"):
            return trainee.passes.read(
                micros, lambda run: run.tokens(temperature)[0], [micro.trainable for micro in micros]
            )

    def values(self, micros: Sequence[MicroBatch], role: str = CRITIC) -> list[torch.Tensor]:
        valuer = self._role(role)
        with self._used(role), self.clock.phase("forward"):
            return valuer.passes.read(micros, lambda run: run.values(), [micro.tokens.shape[1] for micro in micros])

    def step(
        self, micros: Sequence[MicroBatch], algorithm: Algorithm, denominator: float, lr: float, role: str = ACTOR
    ) -> StepResult:
        learner = self._role(role)
        beside = [TEACHER] if TEACHER in algorithm.holds and TEACHER not in algorithm.needs else []
        teacher = self._roles.get(TEACHER) if beside else None
        with self._used(role, *beside, learns=True):
            return learner.step(micros, algorithm, denominator, lr, self._group.sum, teacher)

    def gather(self) -> State | None:
        finish = self.begin_gather()
        return None if finish is None else finish()

    def begin_gather(self) -> Callable[[], State] | None:
        with self._used(ACTOR):
            finish = self._role(ACTOR).begin_gather()
        if CRITIC not in self._roles:
            return finish
        with self._used(CRITIC):
            finish_critic = self._roles[CRITIC].begin_gather()
        if finish is None or finish_critic is None:
            return None
        return lambda: replace(finish(), critic=finish_critic())
