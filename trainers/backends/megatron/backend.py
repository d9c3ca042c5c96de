"""Megatron-core as a backend: a process group with Megatron's groups inside, and a model for each role.

Ranks that share a micro-batch (one cell of tensor, pipeline and context parallelism) are given the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch.distributed.distributed_c10d import ProcessGroup, Store

from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.backends.base import Adam, Backend, StepResult
from millrace.trainers.backends.group import RankGroup, check
from millrace.trainers.backends.layout import ACTOR, CRITIC, MEGATRON, TEACHER, Layout
from millrace.trainers.backends.megatron.groups import EXTRA, MegatronGroups, close_groups, open_groups
from millrace.trainers.backends.models.head import LOGITS
from millrace.trainers.backends.seeding import repeatable
from millrace.trainers.batches.packing import MicroBatch
from millrace.trainers.errors import BadConfiguration, NotFormed
from millrace.trainers.phase_clock import COLLECTIVES, Clock
from millrace.trainers.weights.state import State

if TYPE_CHECKING:
    from millrace.trainers.backends.megatron.forward import MicroBatchRun
    from millrace.trainers.backends.megatron.trainee import MegatronHome, MegatronTrainee


class MegatronBackend(Backend):
    """See the seam. `logits`: how many exist at once."""

    def __init__(
        self,
        adam: Adam | None = None,
        *,
        parallel: Layout | None = None,
        deterministic: bool = True,
        logits: int = LOGITS,
    ) -> None:
        _import()  # now, since peers do not wait for it while they form
        self.adam = adam or Adam()
        self.parallel = parallel or Layout(MEGATRON)
        self.clock = Clock()
        self.device = torch.device("cpu")
        self._deterministic = deterministic
        self._logits = logits
        self._group = RankGroup(self.clock, cuda=False)
        self._groups: MegatronGroups | None = None
        self._roles: dict[str, MegatronTrainee] = {}

    @property
    def kernels(self) -> dict[str, str]:
        return {"repeatable": str(self._deterministic).lower()}

    # ---- the group

    def form(self, rank: int, world: int, store: Store | None, timeout: float) -> None:
        check(rank, world, store)
        layout = self.parallel.within(world)
        self.tear_down()
        self.device = _device(self.first + rank)
        self.clock = Clock(torch.cuda.synchronize) if self.device.type == "cuda" else Clock()
        repeatable(self._deterministic)
        self._group = RankGroup(self.clock, cuda=self.device.type == "cuda")
        self._group.join(rank, world, store, timeout, partial(self._split, layout, timeout))
        self.rank, self.world, self.layout = rank, world, str(layout)

    def _split(self, layout: Layout, timeout: float, _: timedelta) -> None:
        self._groups = open_groups(layout, timeout)

    def abort(self) -> None:
        self._group.abort()

    def tear_down(self) -> None:
        self._group.abort()
        self._groups = None
        self._roles = {}
        close_groups()
        self._group.leave()
        self.rank, self.world, self.layout = 0, 1, ""

    def sum(self, values: Sequence[float]) -> list[float]:
        return self._group.sum(values, self._cells)

    def max(self, values: Sequence[float]) -> list[float]:
        return self._group.max(values)

    def announce(self, message: bytes | None) -> bytes:
        return self._group.announce(message)

    @property
    def _cells(self) -> ProcessGroup | None:
        """Ranks with the same place in their cells, of which each cell has as many; None before there is a group."""
        return self._groups.cells if self._groups is not None else None

    # ---- the models

    def load(self, state: State) -> None:
        from millrace.trainers.backends.megatron.trainee import MegatronTrainee

        self._roles = {}
        self._roles[ACTOR] = MegatronTrainee(state, self._place, self.adam)
        if state.critic is not None:
            self._roles[CRITIC] = MegatronTrainee(state.critic, self._place, self.adam)

    def hold(self, role: str, state: State) -> None:
        from millrace.trainers.backends.megatron.trainee import MegatronTrainee

        self._roles[role] = MegatronTrainee(state, self._place, None)

    @property
    def _live_groups(self) -> MegatronGroups:
        if self._groups is None:
            raise NotFormed("no group yet; call form first")
        return self._groups

    @property
    def _place(self) -> MegatronHome:
        from millrace.trainers.backends.megatron.trainee import MegatronHome

        return MegatronHome(self.device, self._live_groups, self.rank, self.clock, self._logits)

    def _role(self, role: str) -> MegatronTrainee:
        if role not in self._roles:
            raise NotFormed(f"no {role} yet; call form, then load" if role == ACTOR else f"no {role}: load or hold one")
        return self._roles[role]

    @property
    def data_rank(self) -> int:
        return self._live_groups.data_rank

    @property
    def data_world(self) -> int:
        return self._live_groups.layout.d

    @property
    def steps(self) -> int:
        return self._role(ACTOR).steps

    @property
    def vocabulary(self) -> int:
        return self._role(ACTOR).arch.vocabulary

    @property
    def longest(self) -> int:
        return self._role(ACTOR).arch.longest

    # ---- the step

    def score(self, micros: Sequence[MicroBatch], temperature: float, role: str = ACTOR) -> list[torch.Tensor]:
        return self._ask(role, micros, lambda run: run.tokens(temperature)[0], [micro.trainable for micro in micros])

    def values(self, micros: Sequence[MicroBatch], role: str = CRITIC) -> list[torch.Tensor]:
        return self._ask(role, micros, lambda run: run.values(), [micro.tokens.shape[1] for micro in micros])

    def _ask(
        self,
        role: str,
        micros: Sequence[MicroBatch],
        measure: Callable[[MicroBatchRun], torch.Tensor],
        sizes: Sequence[int],
    ) -> list[torch.Tensor]:
        from millrace.trainers.backends.megatron.transfer import broadcast_scores

        trainee = self._role(role)
        with self.clock.phase("forward"):
            scores = trainee.score(micros, measure)
            rows = broadcast_scores(scores, sizes, self._live_groups, self.device)
        return [vector.cpu() for vector in rows]

    def step(
        self, micros: Sequence[MicroBatch], algorithm: Algorithm, denominator: float, lr: float, role: str = ACTOR
    ) -> StepResult:
        return self._role(role).step(micros, algorithm, denominator, lr, self._group.sum, self._roles.get(TEACHER))

    def gather(self) -> State | None:
        with self.clock.phase(COLLECTIVES):
            state = self._role(ACTOR).gather()
            if CRITIC not in self._roles:
                return state
            critic = self._roles[CRITIC].gather()
        return None if state is None else replace(state, critic=critic)


def _import() -> None:
    """What the backend needs of Megatron. BadConfiguration without its package."""
    try:
        import_module("megatron.core")
    except ImportError as error:
        raise BadConfiguration(EXTRA) from error
    import_module("millrace.trainers.backends.megatron.trainee")


def _device(rank: int) -> torch.device:
    """The device that Megatron itself will use. BadConfiguration without a GPU."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    try:
        return torch.device(torch.cuda.current_device())
    except (RuntimeError, AssertionError) as error:
        raise BadConfiguration("megatron needs a GPU; use a torch: layout on a CPU") from error
