"""torch: FSDP2 over gloo, or over NCCL on CUDA. A world of one is the plain model without a process group.

The optimizer works on this rank's shards as plain tensors that share memory with FSDP's: AdamW is elementwise, so
nothing is lost and no DTensor is dispatched. Gradients arrive summed; the one division is in the loss. A step
exchanges, besides FSDP's own collectives, one vector: squared gradient norm, loss, the algorithm's measures.

Invariant of this sibling: no exception object, work handle or traceback is kept, since any of them would hold the
group.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from transformers import PreTrainedModel

from trainers.algorithms.base import Algorithm
from trainers.backends.base import Backend, StepResult
from trainers.backends.comms import COLLECTIVES, TimedAllGather, TimedReduceScatter
from trainers.backends.forward import token_logprobs
from trainers.backends.models import build
from trainers.backends.sharding import numel, part, rows
from trainers.backends.sockets import GroupSockets
from trainers.batches.packing import Packed
from trainers.clock import Clock
from trainers.errors import BadConfiguration, NotFormed
from trainers.state import State

BUCKET = 64 * 2**20
"""Elements that one gather to rank 0 moves at most (or one parameter, if that is larger)."""


@dataclass(frozen=True, slots=True)
class Adam:
    """AdamW's constants; the learning rate comes with each step. clip: largest global gradient norm."""

    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0


class TorchBackend(Backend):
    """See the seam. `device`: cpu or cuda, chosen by what there is when None. `reshard`: free gathered layers between
    forward and backward (less memory, one more all-gather a layer). `deterministic`: only algorithms that give the same
    bytes again."""

    def __init__(
        self,
        adam: Adam | None = None,
        *,
        device: str | None = None,
        reshard: bool = False,
        deterministic: bool = True,
    ) -> None:
        self.adam = adam or Adam()
        self.cuda = (device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
        self.clock = Clock(torch.cuda.synchronize) if self.cuda else Clock()
        self.device = torch.device("cpu")
        self._reshard = reshard
        self._deterministic = deterministic
        self._mesh: DeviceMesh | None = None
        self._sockets: GroupSockets | None = None
        self._forget()

    def _forget(self) -> None:
        self._model: PreTrainedModel | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self._shards: list[torch.nn.Parameter] = []
        self._state = State({}, {})
        self._steps = 0

    # ---- the group

    def form(self, rank: int, world: int, store: Store | None, timeout: float) -> None:
        if not 0 <= rank < world:
            raise BadConfiguration(f"rank {rank} is not in a world of {world}")
        if world > 1 and store is None:
            raise BadConfiguration(f"{world} ranks need a store to meet in")
        self.tear_down()
        torch.use_deterministic_algorithms(self._deterministic)
        if self.cuda:
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        if world > 1 and store is not None:
            self._join(rank, world, store, timeout)
        self.rank, self.world, self.layout = rank, world, f"torch:d{world}"

    def _join(self, rank: int, world: int, store: Store, timeout: float) -> None:
        sockets = GroupSockets()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        sockets.record(PrefixStore("millrace", store), rank, world)
        self._sockets = sockets
        self._mesh = DeviceMesh(self.device.type, list(range(world)))

    def abort(self) -> None:
        sockets = self._sockets
        if sockets is not None:
            sockets.close()

    def tear_down(self) -> None:
        if self._sockets is not None:
            self._sockets.close()
        held = self._model is not None or self._mesh is not None
        self._sockets = self._mesh = None
        self._forget()
        if dist.is_initialized():
            dist.destroy_process_group()
            # DTensor's caches keep the mesh, and so the group, of whoever filled them; worse, meshes of equal shape are
            # equal to them, so tensors of the next group would come out bound to this dead one.
            _clear_sharding_prop_cache()
        if held:
            gc.collect()
            if not gc.get_freeze_count():
                # What lives now (imported modules above all) outlives every group. Without it in the way, collecting
                # takes milliseconds instead of tenths of a second in later tear-downs, and each recovery has one.
                gc.freeze()
        self.rank, self.world, self.layout = 0, 1, ""

    def sum(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        vector = torch.tensor(values, dtype=torch.float64)
        if self._mesh is not None and len(values) > 0:
            with self.clock.phase(COLLECTIVES):
                dist.all_reduce(vector, op=op)
        return [float(value) for value in vector]

    # ---- the model

    def load(self, state: State) -> None:
        self._forget()
        model = build(state.assets, state.weights)
        torch.nn.Module.to(model, self.device)
        if self._mesh is not None:
            self._shard(model, self._mesh)
        self._model, self._state, self._steps = model, State({}, state.assets, {}, 0, state.seed), state.step
        with torch.no_grad():
            self._shards = [
                torch.nn.Parameter(p.to_local() if isinstance(p, DTensor) else p.data) for p in model.parameters()
            ]
        self._optimizer = torch.optim.AdamW(
            self._shards, betas=self.adam.betas, eps=self.adam.eps, weight_decay=self.adam.weight_decay, foreach=False
        )
        if not state.moments:
            return
        for (name, _), shard in zip(model.named_parameters(), self._shards, strict=True):
            self._optimizer.state[shard] = {
                "step": torch.tensor(float(state.step)),
                **{
                    slot: part(full[name], self.world, self.rank).to(self.device, copy=True).view_as(shard)
                    for slot, full in state.moments.items()
                },
            }

    def _shard(self, model: PreTrainedModel, mesh: DeviceMesh) -> None:
        layers = model.get_submodule(f"{model.base_model_prefix}.layers")
        for unit in (*layers.children(), model):
            fully_shard(unit, mesh=mesh, reshard_after_forward=self._reshard)
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.set_custom_all_gather(TimedAllGather(self.clock))
                unit.set_custom_reduce_scatter(TimedReduceScatter(self.clock))
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)

    @property
    def model(self) -> PreTrainedModel:
        """The model itself; whole only in a world of 1 (sampling, evaluation)."""
        if self._model is None:
            raise NotFormed("no model yet; call form, then load")
        return self._model

    @property
    def steps(self) -> int:
        return self._steps

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def longest(self) -> int:
        return int(self.model.config.max_position_embeddings)

    # ---- the step

    def score(self, micros: Sequence[Packed], temperature: float) -> list[torch.Tensor]:
        with self.clock.phase("forward"), torch.no_grad():
            return [token_logprobs(self.model, micro.to(self.device), temperature)[0].cpu() for micro in micros]

    def step(self, micros: Sequence[Packed], algorithm: Algorithm, denominator: float, lr: float) -> StepResult:
        if self._optimizer is None:
            raise NotFormed("no optimizer yet; call form, then load")
        model = self.model
        self._reseed()
        totals = dict.fromkeys(algorithm.measures, 0.0)
        loss = 0.0
        for index, micro in enumerate(micros):
            batch = micro.to(self.device)
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(index == len(micros) - 1)
            with self.clock.phase("forward"):
                logprobs, entropy = token_logprobs(model, batch, algorithm.temperature)
                summed, sums = algorithm.loss(logprobs, entropy, batch)
            with self.clock.phase("backward"):
                (summed / denominator).backward()
            loss += float(summed.detach())
            for name in totals:
                totals[name] += float(sums[name])
        with self.clock.phase("optimizer"):
            squared = self._collect_gradients()
        squared, loss, *measured = self.sum([squared, loss, *totals.values()])
        norm = math.sqrt(squared) if squared >= 0 else math.nan
        loss /= denominator
        applied = math.isfinite(norm) and math.isfinite(loss)
        with self.clock.phase("optimizer"):
            self._apply(norm, lr, applied)
        return StepResult(
            loss=loss,
            grad_norm=norm,
            sums=dict(zip(totals, measured, strict=True)),
            applied=applied,
            tokens=sum(micro.length for micro in micros),
            samples=sum(micro.samples for micro in micros),
        )

    def _reseed(self) -> None:
        words = np.random.SeedSequence((self._state.seed, self._steps, self.rank)).generate_state(2)
        torch.manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)

    def _collect_gradients(self) -> float:
        """Hands FSDP's summed gradients to the shards; this rank's part of the squared norm, in float64."""
        squared = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for parameter, shard in zip(self.model.parameters(), self._shards, strict=True):
                gradient = parameter.grad
                parameter.grad = None
                if gradient is None:
                    shard.grad = torch.zeros_like(shard)
                    continue
                shard.grad = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                squared += torch.linalg.vector_norm(shard.grad).double() ** 2
        return float(squared)

    def _apply(self, norm: float, lr: float, applied: bool) -> None:
        if self._optimizer is not None and applied:
            scale = min(1.0, self.adam.clip / (norm + 1e-6))
            for shard in self._shards:
                if shard.grad is not None:
                    shard.grad.mul_(scale)
            for settings in self._optimizer.param_groups:
                settings["lr"] = lr
            self._optimizer.step()
            self._steps += 1
        for shard in self._shards:
            shard.grad = None

    # ---- the state

    def gather(self) -> State | None:
        names = [name for name, _ in self.model.named_parameters()]
        shapes = [tuple(p.shape) for p in self.model.parameters()]
        slots = {"": [shard.detach() for shard in self._shards]}
        if self._optimizer is not None and self._optimizer.state:
            for slot in ("exp_avg", "exp_avg_sq"):
                slots[slot] = [self._optimizer.state[shard][slot] for shard in self._shards]
        gathered = {}
        with self.clock.phase(COLLECTIVES):
            for slot, shards in slots.items():
                gathered[slot] = self._gather_tensors(names, shapes, shards)
        if self.rank != 0:
            return None
        weights = gathered.pop("")
        return State(weights, self._state.assets, gathered, self._steps, self._state.seed)

    def _gather_tensors(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], shards: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Full tensors by name on rank 0, on the CPU; empty elsewhere. One collective a bucket."""
        if self._mesh is None:
            return {name: shard.to("cpu", copy=True) for name, shard in zip(names, shards, strict=True)}
        full: dict[str, torch.Tensor] = {}
        for bucket in _buckets(shapes):
            widest = max(sum(numel(shapes[i], self.world, rank) for i in bucket) for rank in range(self.world))
            mine = torch.cat([shards[i].reshape(-1) for i in bucket])
            padded = torch.nn.functional.pad(mine, (0, widest - mine.numel()))
            parts = [torch.empty_like(padded) for _ in range(self.world)] if self.rank == 0 else None
            dist.gather(padded, parts, dst=0)
            if parts is None:
                continue
            at = [0] * self.world
            for i in bucket:
                pieces = []
                for rank, flat in enumerate(parts):
                    lo, hi = rows(shapes[i][0], self.world, rank)
                    size = numel(shapes[i], self.world, rank)
                    pieces.append(flat[at[rank] : at[rank] + size].view(hi - lo, *shapes[i][1:]))
                    at[rank] += size
                full[names[i]] = torch.cat(pieces).cpu()
        return full


def _buckets(shapes: Sequence[tuple[int, ...]]) -> list[list[int]]:
    buckets: list[list[int]] = [[]]
    filled = 0
    for index, shape in enumerate(shapes):
        size = math.prod(shape)
        if buckets[-1] and filled + size > BUCKET:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += size
    return buckets
