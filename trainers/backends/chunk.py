"""A model of the torch backend, or one pipeline stage of it, where it shall live: built, cut along the axes of its
layout, in its number format, sharded by FSDP2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from trainers.backends.comms import TimedAllGather, TimedReduceScatter
from trainers.backends.compute import Compute
from trainers.backends.models import build
from trainers.backends.parallel.context import spread
from trainers.backends.parallel.experts import Experts
from trainers.backends.parallel.grid import CP, EDP, FS, PP, TP, Groups
from trainers.backends.parallel.regions import Held
from trainers.backends.parallel.schedules import ONE_F_ONE_B
from trainers.backends.parallel.split import split
from trainers.backends.parallel.stages import Stage, name_of
from trainers.clock import Clock
from trainers.errors import BadConfiguration
from trainers.lora import attach
from trainers.state import State


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model lives: its device, and the groups of ranks that it is spread over."""

    device: torch.device
    groups: Groups
    clock: Clock
    reshard: bool
    compute: Compute
    schedule: str = ONE_F_ONE_B

    @property
    def copies(self) -> bool:
        """Whether models compute with bf16 copies of their parameters: without FSDP, which makes its own."""
        return self.compute.bf16 and FS not in self.groups.meshes


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """model: with this rank's parameters. held: which part of the whole model's each one is that learns, in order.
    masters: their fp32 values where the model computes with copies, else empty."""

    model: PreTrainedModel
    held: Sequence[Held]
    masters: Sequence[torch.Tensor]


def make(state: State, stage: Stage, place: Place, learns: bool) -> Chunk:
    """One stage of the model of `state`. Needs no collective. BadConfiguration for an adapter in a layout that cuts
    more than the data."""
    model = build(state.assets, state.weights, stage)
    if state.adapter is not None:
        layout = place.groups.grid.layout
        if layout.split not in ("", "d"):
            raise BadConfiguration(f"{layout}: an adapter trains with data parallelism alone, d{layout.world}")
        attach(model, state.adapter)
    torch.nn.Module.to(model, place.device)
    if not learns:
        model.requires_grad_(False)
        model.train(False)
    if place.groups.size(CP) > 1:
        spread(model, place.groups.size(CP), place.groups.size(TP))
    parts = split(model, place.groups, place.clock, learns=learns and stage.count == 1)
    held = [one for one, p in zip(parts, model.parameters(), strict=True) if p.requires_grad]
    if stage.count > 1:
        at = place.groups.index(PP)
        held = [replace(one, name=name_of(model, one.name), stage=at) for one in held]
    place.compute.prepare(model)
    masters: list[torch.Tensor] = []
    if FS in place.groups.meshes:
        _shard(model, place)
    else:
        if place.copies:
            masters = [p.data for p in model.parameters() if p.requires_grad]
        place.compute.narrow(model)
    return Chunk(model, held, masters)


def _shard(model: PreTrainedModel, place: Place) -> None:
    meshes = place.groups.meshes
    layers = model.get_submodule(f"{model.base_model_prefix}.layers")
    units: list[tuple[torch.nn.Module, DeviceMesh]] = [(unit, meshes[FS]) for unit in (*layers.children(), model)]
    apart: set[torch.nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, Experts):
            if EDP in meshes:
                units.insert(0, (module, meshes[EDP]))
            else:
                apart |= set(module.parameters())
    for unit, mesh in units:
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=place.reshard,
            mp_policy=place.compute.policy,
            ignored_params=apart,
        )
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_custom_all_gather(TimedAllGather(place.clock))
            unit.set_custom_reduce_scatter(TimedReduceScatter(place.clock))
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
