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

from millrace.trainers.backends.layout import Layout
from millrace.trainers.backends.models.build import build, narrow_tables
from millrace.trainers.backends.models.rows import has_rows
from millrace.trainers.backends.models.stages import PipelineStage, name_of
from millrace.trainers.backends.parallel import experts, tensor
from millrace.trainers.backends.parallel.collectives import Team
from millrace.trainers.backends.parallel.context import spread
from millrace.trainers.backends.parallel.experts import Experts
from millrace.trainers.backends.parallel.grid import CP, EDP, EP, FS, PP, TP, Groups
from millrace.trainers.backends.parallel.regions import ShardedParameter, take
from millrace.trainers.backends.parallel.schedules import ONE_F_ONE_B
from millrace.trainers.backends.torch.compute import Compute
from millrace.trainers.backends.torch.fusion import Fusion
from millrace.trainers.errors import BadConfiguration
from millrace.trainers.phase_clock import Clock
from millrace.trainers.private_apis.fsdp import TimedAllGather, TimedReduceScatter
from millrace.trainers.weights.lora import attach, file_name
from millrace.trainers.weights.state import State

SINKS = "sinks"
"""how parameters end that are one number a head"""


@dataclass(frozen=True, slots=True)
class Home:
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
class ModelChunk:
    """model: with this rank's parameters. shards: which part of the whole model's each one is that learns, in order.
    masters: their fp32 values where the model computes with copies, else empty. fusion: how its layers are fused."""

    model: PreTrainedModel
    shards: Sequence[ShardedParameter]
    masters: Sequence[torch.Tensor]
    fusion: Fusion


def make(state: State, stage: PipelineStage, place: Home, learns: bool) -> ModelChunk:
    """One stage of the model of `state`. Needs no collective. BadConfiguration for an adapter in a layout that cuts
    more than the data."""
    model = build(state.assets, state.tensors, stage)
    _check_cuts(model, place.groups.grid.layout)
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
    learning = [one for one, p in zip(parts, model.parameters(), strict=True) if p.requires_grad]
    if stage.count > 1:
        at = place.groups.index(PP)
        learning = [replace(one, name=name_of(model, one.name), stage=at) for one in learning]
    if place.compute.bf16:
        narrow_tables(model)
    fusion = place.compute.prepare(model, _layers(model) if place.compute.fusion != "none" else (), place.device)
    masters: list[torch.Tensor] = []
    offloads = place.compute.optimizer_offload
    if offloads and not place.copies:
        raise BadConfiguration(
            "optimizer_offload keeps what bf16 copies are made of in main memory, for one learner: set precision = "
            '"bf16" and one learner, or backend = "deepspeed" with zero_offload for several'
        )
    if FS in place.groups.meshes:
        _shard(model, place)
    else:
        if place.copies:
            masters = [p.data.cpu() if offloads else p.data for p in model.parameters() if p.requires_grad]
        place.compute.narrow(model)
    return ModelChunk(model, learning, masters, fusion)


def _check_cuts(model: PreTrainedModel, layout: Layout) -> None:
    """BadConfiguration where a layout cuts what this model must have whole."""
    if layout.split in ("", "d"):
        return
    name = f"{type(model).__name__} ({model.config.model_type})"
    if has_rows(model):
        raise BadConfiguration(
            f"{layout}: {name} computes each sample in a row of its own, which data parallelism alone can share: "
            f"choose d{layout.world}"
        )
    if model.config.get_text_config() is not model.config:
        raise BadConfiguration(f"{layout}: {name} reads more than text: choose data parallelism, d{layout.world}")
    if layout.t * layout.c > 1 and any(name.endswith(SINKS) for name, _ in model.named_parameters()):
        raise BadConfiguration(f"{layout}: {name} has attention sinks, which t and c do not divide: choose t1 and c1")


def _shard(model: PreTrainedModel, place: Home) -> None:
    meshes = place.groups.meshes
    units: list[tuple[torch.nn.Module, DeviceMesh]] = [(unit, meshes[FS]) for unit in (*_layers(model), model)]
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


def _layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers of a model, or of a pipeline stage, under whatever name its class has them. BadConfiguration where
    that is not clear."""
    base: torch.nn.Module = model.base_model
    layers = getattr(base, "layers", None)
    if isinstance(layers, torch.nn.ModuleList):
        return list(layers)
    count = int(model.config.get_text_config().num_hidden_layers)
    lists = [module for module in base.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == count]
    if not lists:
        raise BadConfiguration(f"{type(model).__name__} has no list of {count} layers to spread over ranks: train on 1")
    return list(lists[0])


def split(model: PreTrainedModel, groups: Groups, clock: Clock, *, learns: bool = True) -> list[ShardedParameter]:
    """Where each parameter of the model lies, in the order of its parameters. BadConfiguration, with the reason, where
    the model does not divide as the layout says; only a model that learns must have experts to spread."""
    layout = groups.grid.layout
    columns = tensor.cuts(model) if layout.t > 1 else {}
    spread = experts.names(model) if layout.e > 1 else set()
    if layout.t > 1:
        tensor.check(model.config, layout.t)
    if spread or (layout.e > 1 and learns):
        experts.check(model, layout.e)
    parameters = []
    for name, parameter in model.named_parameters():
        cuts: tuple[tuple[str, int], ...] = ((FS, 0),)
        if name in spread:
            cuts = ((EP, 0), (EDP, 0))
        elif name in columns:
            cuts = ((TP, columns[name]), *cuts)
        entry = ShardedParameter(file_name(name), tuple(parameter.shape), cuts)
        if len(cuts) > 1:
            with torch.no_grad():
                parameter.data = take(parameter.data, entry.before_fsdp(groups.grid, groups.rank)).clone()
        parameters.append(entry)
    if layout.t > 1:
        tensor.apply(model, _team(groups, TP, clock))
    if spread:
        experts.apply(model, _team(groups, EP, clock))
    return parameters


def _team(groups: Groups, axis: str, clock: Clock) -> Team:
    return Team(groups.by_axis[axis], groups.index(axis), groups.size(axis), clock)
