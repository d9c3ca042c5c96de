"""torch over gloo, or over NCCL on CUDA: FSDP2, and within a cell of ranks tensor, expert, context and pipeline
parallelism (`parallel/`). A world of one is the plain model without a process group.

Several models may live in one group: the policy, its critic, and frozen ones that only score (`trainee.py`).

Invariant of this sibling: no exception object, work handle or traceback is kept, since any of them would hold the
group.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout, _world
from transformers import PreTrainedModel

from trainers.algorithms.base import Algorithm, Run
from trainers.backends.base import ACTOR, CRITIC, ROLES, TEACHER, Backend, StepResult
from trainers.backends.caches import forget_meshes
from trainers.backends.comms import COLLECTIVES
from trainers.backends.compute import Compute
from trainers.backends.layout import TORCH, Layout
from trainers.backends.offload import Shelf, check_roles
from trainers.backends.parallel.grid import DP, Grid, Groups
from trainers.backends.parallel.schedules import ONE_F_ONE_B, chunks_of
from trainers.backends.sockets import GroupSockets
from trainers.backends.trainee import Adam, Place, Trainee
from trainers.batches.packing import Packed
from trainers.clock import Clock
from trainers.errors import BadConfiguration, NotFormed
from trainers.state import State

__all__ = ["Adam", "TorchBackend"]

DIMENSIONS = "dtpce"
"""along which this backend can split"""

FORM_S = 10.0
"""longest that ranks wait for each other to form, all of them being on their way: one of them may have died since"""


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
        self.cuda = (device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
        self.clock = Clock(torch.cuda.synchronize) if self.cuda else Clock()
        self.device = torch.device("cpu")
        self._reshard = reshard
        chunks_of(schedule)
        self._schedule = schedule
        self._deterministic = deterministic
        self.compute = compute or Compute()
        check_roles(offload, ROLES)
        self.offload = frozenset(offload)
        self._groups = Groups(Grid(), 0)
        self._sockets: GroupSockets | None = None
        self._forget()

    def _forget(self) -> None:
        self._roles: dict[str, Trainee] = {}
        self._shelves: dict[str, Shelf] = {}

    # ---- the group

    def form(self, rank: int, world: int, store: Store | None, timeout: float) -> None:
        if not 0 <= rank < world:
            raise BadConfiguration(f"rank {rank} is not in a world of {world}")
        if world > 1 and store is None:
            raise BadConfiguration(f"{world} ranks need a store to meet in")
        layout = self.parallel.within(world)
        self.tear_down()
        torch.use_deterministic_algorithms(self._deterministic)
        if self.cuda:
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        if world > 1 and store is not None:
            self._join(rank, Grid(layout), store, timeout)
        self.rank, self.world, self.layout = rank, world, str(layout)

    def _join(self, rank: int, grid: Grid, store: Store, timeout: float) -> None:
        sockets = GroupSockets()
        world, forming = grid.world, timedelta(seconds=min(timeout, FORM_S))
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.cuda else "gloo",
                store=store,
                rank=rank,
                world_size=world,
                timeout=forming,
            )
            groups = Groups.form(grid, rank, self.device, forming, timedelta(seconds=timeout))
        except BaseException:
            # torch names a group by how many this process has made, and counts anew only when a group ends. After one
            # that never came to be, this process would look for its peers under another name than theirs, for ever.
            if dist.is_initialized():
                dist.destroy_process_group()
            _world.group_count = 0
            raise
        _set_pg_timeout(timedelta(seconds=timeout))
        sockets.record(PrefixStore("millrace", store), rank, world)
        self._sockets = sockets
        self._groups = groups

    @property
    def data_rank(self) -> int:
        return self._groups.index(DP)

    @property
    def data_world(self) -> int:
        return self._groups.size(DP)

    def abort(self) -> None:
        sockets = self._sockets
        if sockets is not None:
            sockets.close()

    def tear_down(self) -> None:
        if self._sockets is not None:
            self._sockets.close()
        held = bool(self._roles) or self._sockets is not None
        self._sockets, self._groups = None, Groups(Grid(), 0)
        self._forget()
        if dist.is_initialized():
            dist.destroy_process_group()
            forget_meshes()
        if held:
            gc.collect()
            if not gc.get_freeze_count():
                # What lives now (imported modules above all) outlives every group. Without it in the way, collecting
                # takes milliseconds instead of tenths of a second in later tear-downs, and each recovery has one.
                gc.freeze()
        self.rank, self.world, self.layout = 0, 1, ""

    def sum(self, values: Sequence[float]) -> list[float]:
        return self._add(values if self._groups.grid.leads(self.rank) else [0.0] * len(values))

    def _add(self, values: Sequence[float]) -> list[float]:
        """Over all ranks, each counted."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        vector = torch.tensor(values, dtype=torch.float64)
        if self.world > 1 and len(values) > 0:
            with self.clock.phase(COLLECTIVES):
                dist.all_reduce(vector, op=op)
        return [float(value) for value in vector]

    # ---- the models

    def load(self, state: State) -> None:
        self._forget()
        self._play(ACTOR, Trainee(state, self._place, self.adam))
        if state.critic is not None:
            self._play(CRITIC, Trainee(state.critic, self._place, self.adam))

    def hold(self, role: str, state: State) -> None:
        self._play(role, Trainee(state, self._place, None))

    def _play(self, role: str, trainee: Trainee) -> None:
        self._roles[role] = trainee
        if role in self.offload:
            self._shelves[role] = Shelf(self.device)
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
            tensors = self._roles[role].resident()
            if learns and role == roles[0]:
                self._shelves[role].put(tensors)
            else:
                self._shelves[role].put_back()

    @property
    def _place(self) -> Place:
        return Place(self.device, self._groups, self.clock, self._reshard, self.compute, self._schedule)

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
        return int(self._role(ACTOR).model.config.vocab_size)

    @property
    def longest(self) -> int:
        return int(self._role(ACTOR).model.config.max_position_embeddings)

    def passes(self, micro: Packed) -> Run:
        """A forward pass of the policy, to measure without learning; whole only in a world of 1."""
        for role in (ACTOR, TEACHER):
            if role in self._shelves:
                self._shelves[role].fetch()
        teacher = self._roles.get(TEACHER)
        return self._role(ACTOR).passes.one(micro, teacher=teacher.passes if teacher else None)

    # ---- the step

    def score(self, micros: Sequence[Packed], temperature: float, role: str = ACTOR) -> list[torch.Tensor]:
        trainee = self._role(role)
        with self._used(role), self.clock.phase("forward"):
            return trainee.passes.read(
                micros, lambda run: run.tokens(temperature)[0], [micro.trainable for micro in micros]
            )

    def values(self, micros: Sequence[Packed]) -> list[torch.Tensor]:
        critic = self._role(CRITIC)
        with self._used(CRITIC), self.clock.phase("forward"):
            return critic.passes.read(micros, lambda run: run.values(), [micro.tokens.shape[1] for micro in micros])

    def step(
        self, micros: Sequence[Packed], algorithm: Algorithm, denominator: float, lr: float, role: str = ACTOR
    ) -> StepResult:
        learner = self._role(role)
        beside = [TEACHER] if TEACHER in algorithm.holds and TEACHER not in algorithm.needs else []
        teacher = self._roles.get(TEACHER) if beside else None
        with self._used(role, *beside, learns=True):
            return learner.step(micros, algorithm, denominator, lr, self._add, teacher)

    def gather(self) -> State | None:
        with self._used(ACTOR):
            state = self._role(ACTOR).gather()
        if CRITIC not in self._roles:
            return state
        with self._used(CRITIC):
            critic = self._roles[CRITIC].gather()
        return None if state is None else replace(state, critic=critic)
