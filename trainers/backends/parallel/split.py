"""Leaves of a whole model, in place, what one rank of a layout computes with. No collective."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from millrace.trainers.backends.parallel import experts, tensor
from millrace.trainers.backends.parallel.collectives import Team
from millrace.trainers.backends.parallel.grid import EDP, EP, FS, TP, Groups
from millrace.trainers.backends.parallel.regions import ShardedParameter, take
from millrace.trainers.phase_clock import Clock
from millrace.trainers.weights.lora import file_name


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
