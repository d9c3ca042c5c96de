"""An allocation with roles: the ranks of one world, of which some play the actor and others serve it.

    torch[actor]:d2+torch[critic]:d1|torch[reference]:d1      two ranks train, a third is critic and reference

Components joined by | share ranks, + gives them ranks of their own. Roles that the allocation does not name live with
the actor. Each place is a torch backend over its own ranks; between places samples, scores, values and the
results of steps cross a `Bridge`.

    actor's ranks      samples -> send -> wait            -> scores, values, results of the critic's steps
    a role's ranks     receive -> score, value or step    -> send

Why one world instead of a consumer group for each role: `gather` brings actor and critic together into one State, so a
version stays one atomic checkpoint; and a rank that dies makes all of them fail and form again together, from the same
version.

Invariants: every rank calls the same methods in the same order, as on any backend; ranks that serve have no share of a
batch and count in no sum; the actor's ranks come first, so rank 0 gathers. Results are those of colocated roles, up to
the order of sums.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store
from transformers import PretrainedConfig

from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.backends.base import Backend, StepResult
from millrace.trainers.backends.bridge import Bridge
from millrace.trainers.backends.group import check
from millrace.trainers.backends.layout import ACTOR, CRITIC, Allocation, Layout
from millrace.trainers.backends.places import backend_role, by_cell, format_places, places_of
from millrace.trainers.batches import wire
from millrace.trainers.batches.packing import MicroBatch, pack
from millrace.trainers.errors import BadConfiguration, NotFormed
from millrace.trainers.weights.model_class import context_length, read_config, vocabulary_of
from millrace.trainers.weights.state import State

Compute = Callable[[Sequence[MicroBatch]], list[torch.Tensor]]
MOMENTS = ("exp_avg", "exp_avg_sq")


class RolesBackend(Backend):
    """See the seam. `make`: an unformed backend for a layout whose roles (as it will know them) may be offloaded."""

    def __init__(
        self, allocation: Allocation, make: Callable[[Layout, Sequence[str]], Backend], offload: Sequence[str] = ()
    ) -> None:
        self._allocation = allocation
        self._places = places_of(allocation)
        self._backends = [
            make(place.layout, [backend_role(index, role) for role in offload if role in place.roles])
            for index, place in enumerate(self._places)
        ]
        self._inner, self._at = self._backends[0], 0
        self._bridge: Bridge | None = None
        self.parallel = self._places[0].layout
        self.clock = self._inner.clock
        self.adapters = self._inner.adapters
        self.shares_prefixes = all(backend.shares_prefixes for backend in self._backends)
        self._about: State | None = None
        self._steps = 0

    def _where(self, role: str) -> int:
        """The place of a role."""
        return next((index for index, place in enumerate(self._places) if role in place.roles), 0)

    def plays(self, role: str) -> bool:
        return self._where(role) == self._at

    def apart(self, role: str) -> bool:
        return self._where(role) > 0

    # ---- the group

    def form(self, rank: int, world: int, store: Store | None, timeout: float) -> None:
        check(rank, world, store)
        actor, *servers = self._places
        serving = sum(place.layout.world for place in servers)
        if world <= serving or store is None:
            few = "1 rank is too few" if world == 1 else f"{world} ranks are too few"
            raise BadConfiguration(
                f"{few}: {self._allocation} needs {serving} for serving roles and at least 1 for the actor"
            )
        layouts = [actor.layout.within(world - serving), *(place.layout for place in servers)]
        self.tear_down()
        ends = [sum(layout.world for layout in layouts[: index + 1]) for index in range(len(layouts))]
        self._at = next(index for index, end in enumerate(ends) if rank < end)
        self._inner = self._backends[self._at]
        first = ends[self._at] - layouts[self._at].world
        try:
            self._bridge = Bridge(rank, world, store, timeout, self._inner.clock)
            self._inner.first = first
            self._inner.form(rank - first, layouts[self._at].world, PrefixStore(f"place-{self._at}", store), timeout)
            row = [float(self._inner.data_rank) if rank == peer else 0.0 for peer in range(world)]
            cells = [int(cell) for cell in self._bridge.sum(row)]
        except BaseException:
            self.tear_down()
            raise
        starts = [end - layout.world for end, layout in zip(ends, layouts, strict=True)]
        self._places = [
            replace(place, first=start, cells=by_cell(cells[start:end], start))
            for place, start, end in zip(self._places, starts, ends, strict=True)
        ]
        self.clock = self._inner.clock
        self.acts = self._at == 0
        places = [replace(place, layout=layout) for place, layout in zip(self._places, layouts, strict=True)]
        self.rank, self.world, self.layout = rank, world, format_places(places)

    @property
    def data_rank(self) -> int:
        return self._inner.data_rank if self.acts else 0

    @property
    def data_world(self) -> int:
        return max(1, len(self._places[0].cells))

    def abort(self) -> None:
        bridge = self._bridge
        self._inner.abort()
        if bridge is not None:
            bridge.abort()

    def tear_down(self) -> None:
        bridge, self._bridge = self._bridge, None
        if bridge is not None:
            bridge.leave()
        self._inner.tear_down()
        self._about = None
        self._places = [replace(place, cells=()) for place in self._places]
        self.acts = True
        self.rank, self.world, self.layout = 0, 1, ""

    @property
    def _over(self) -> Bridge:
        if self._bridge is None:
            raise NotFormed("no group yet; call form, then load")
        return self._bridge

    def sum(self, values: Sequence[float]) -> list[float]:
        leads = self.acts and self.rank in self._places[0].leaders
        return self._over.sum(values if leads else [0.0] * len(values))

    def max(self, values: Sequence[float]) -> list[float]:
        return self._over.max(values)

    def announce(self, message: bytes | None) -> bytes:
        return self._over.announce(message)

    # ---- the models

    def load(self, state: State) -> None:
        critic = state.critic
        self._about, self._steps = _outline(state), state.step
        if self.acts:
            self._inner.load(replace(state, critic=None) if self.apart(CRITIC) else state)
        elif critic is not None and self.plays(CRITIC):
            self._inner.load(critic)

    def hold(self, role: str, state: State) -> None:
        if self.plays(role):
            self._inner.hold(role, state)

    @property
    def _actor_state(self) -> State:
        if self._about is None:
            raise NotFormed("no actor yet; call form, then load")
        return self._about

    @property
    def steps(self) -> int:
        assert self._actor_state
        return self._steps

    @property
    def _config(self) -> PretrainedConfig:
        return read_config(json.loads(self._actor_state.assets["config.json"]))

    @property
    def vocabulary(self) -> int:
        return vocabulary_of(self._config)

    @property
    def longest(self) -> int:
        return context_length(self._config)

    # ---- the step

    def score(self, micros: Sequence[MicroBatch], temperature: float, role: str = ACTOR) -> list[torch.Tensor]:
        inner = backend_role(self._at, role)
        sizes = [micro.trainable for micro in micros]
        return self._ask_role(role, micros, lambda share: self._inner.score(share, temperature, inner), sizes)

    def values(self, micros: Sequence[MicroBatch], role: str = CRITIC) -> list[torch.Tensor]:
        inner = backend_role(self._at, role)
        sizes = [micro.tokens.shape[1] for micro in micros]
        return self._ask_role(role, micros, lambda share: self._inner.values(share, inner), sizes)

    def _ask_role(
        self, role: str, micros: Sequence[MicroBatch], compute: Compute, sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """What a role computes of the actor's micro-batches; nothing, on ranks that serve."""
        blanks = [torch.zeros(0) for _ in micros]
        place = self._where(role)
        if place == 0:
            return compute(micros) if self.acts else blanks
        if self.acts:
            self._send(micros, place)
            return self._hear(place, sizes)
        if place == self._at:
            self._answer(len(micros), compute)
        return blanks

    def step(
        self, micros: Sequence[MicroBatch], algorithm: Algorithm, denominator: float, lr: float, role: str = ACTOR
    ) -> StepResult:
        place = self._where(role)
        share: Sequence[MicroBatch] = micros
        if place > 0:
            if self.acts:
                self._send(micros, place)
            elif place == self._at:
                share = self._receive_micros(len(micros))
        numbers = [0.0] * (3 + len(algorithm.measures))
        if place == self._at:
            result = self._inner.step(share, algorithm, denominator, lr, backend_role(place, role))
            numbers = [
                result.loss,
                result.grad_norm,
                float(result.applied),
                *(result.sums[n] for n in algorithm.measures),
            ]
        loss, norm, was_applied, *sums = self._over.tell(numbers, self._places[place].first)
        if role == ACTOR:
            self._steps += int(was_applied)
        return StepResult(
            loss=loss,
            grad_norm=norm,
            sums=dict(zip(algorithm.measures, sums, strict=True)),
            applied=bool(was_applied),
            tokens=sum(micro.length for micro in micros),
            samples=sum(micro.samples for micro in micros),
        )

    # ---- between places

    def _send(self, micros: Sequence[MicroBatch], place: int) -> None:
        if self.rank not in self._places[0].leaders:
            return
        shares = self._places[place].shares(self.data_rank, len(micros))
        for ranks, share in zip(self._places[place].cells, shares, strict=True):
            tensors = [tensor for m in share for tensor in wire.encode(micros[m])]
            for to in ranks if share else ():
                self._over.send(tensors, to)

    def _receive_micros(self, count: int) -> list[MicroBatch]:
        """This cell's micro-batches, as many as every cell's of this place."""
        index = self._inner.data_rank
        micros: list[MicroBatch] = []
        for cell, leader in enumerate(self._places[0].leaders):
            if self._places[self._at].shares(cell, count)[index]:
                tensors = self._over.receive(leader)
                starts = range(0, len(tensors), wire.TENSORS)
                micros += [wire.decode(tensors[start : start + wire.TENSORS]) for start in starts]
        every = count * len(self._places[0].leaders)
        most = -(-every // len(self._places[self._at].leaders))
        return [*micros, *(pack([]) for _ in range(most - len(micros)))]

    def _answer(self, count: int, compute: Compute) -> None:
        answers = iter(compute(self._receive_micros(count)))
        if self.rank not in self._places[self._at].leaders:
            return
        for cell, ranks in enumerate(self._places[0].cells):
            share = self._places[self._at].shares(cell, count)[self._inner.data_rank]
            rows = [next(answers).float() for _ in share]
            for to in ranks if share else ():
                self._over.send(rows, to)

    def _hear(self, place: int, sizes: Sequence[int]) -> list[torch.Tensor]:
        rows: dict[int, torch.Tensor] = {}
        shares = self._places[place].shares(self.data_rank, len(sizes))
        for leader, share in zip(self._places[place].leaders, shares, strict=True):
            if share:
                rows |= zip(share, self._over.receive(leader), strict=True)
        return [rows[m][:size] for m, size in enumerate(sizes)]

    # ---- the state

    @property
    def kernels(self) -> dict[str, str]:
        return self._inner.kernels

    def room(self) -> int | None:
        return self._inner.room() if self.acts else None

    def gather(self) -> State | None:
        about = self._actor_state
        state = self._inner.gather() if self.acts or (about.critic and self.plays(CRITIC)) else None
        if about.critic is None or not self.apart(CRITIC):
            return state if self.acts else None
        sender = self._places[self._where(CRITIC)].first
        if self.rank == sender:
            assert state is not None, "the first rank of a place gathers"
            self._send_state(state)
        if self.rank != 0:
            return None
        assert state is not None, "rank 0 gathers"
        return replace(state, critic=self._receive_state(about.critic, sender))

    def begin_gather(self) -> Callable[[], State] | None:
        if self._actor_state.critic is not None and self.apart(CRITIC):
            return super().begin_gather()
        return self._inner.begin_gather() if self.acts else None

    def _send_state(self, state: State) -> None:
        self._over.send([torch.tensor([state.step, len(state.moments)])], 0)
        for tensors in (state.weights, *(state.moments[slot] for slot in MOMENTS if slot in state.moments)):
            for name in sorted(tensors):
                self._over.send([tensors[name]], 0)

    def _receive_state(self, like: State, sender: int) -> State:
        step, slots = self._over.receive(sender)[0].tolist()
        columns = [{name: self._over.receive(sender)[0] for name in sorted(like.weights)} for _ in range(1 + slots)]
        weights = {name: columns[0][name] for name in like.weights}
        moments = {
            slot: {name: tensors[name] for name in like.weights}
            for slot, tensors in zip(MOMENTS, columns[1:], strict=False)
        }
        return State(weights, like.assets, moments, step, like.seed, constants=like.constants)


def _outline(state: State) -> State:
    """The same without the numbers that change: names and shapes, of the critic too."""
    weights = {name: tensor.to("meta") for name, tensor in state.weights.items()}
    critic = None if state.critic is None else _outline(state.critic)
    return State(weights, state.assets, {}, state.step, state.seed, critic, constants=state.constants)
