"""Where DeepSpeed keeps what: the fp32 weights and Adam's moments, cut differently by each ZeRO stage.

Stage 0 keeps every parameter whole on every rank. Stages 1 and 2 lay all parameters end to end and cut the row into one
piece a rank, so a piece may begin or end inside a parameter. Stage 3 cuts each parameter into one piece a rank, the
last padded. A `Fragment` says it once for all: these elements of that parameter lie there. Reading and writing them is
local, so loading needs no collective.

DeepSpeed names these places with private attributes; they are those of 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from millrace.trainers.backends.parallel.gathering import buckets
from millrace.trainers.private_apis.deepspeed import fp32_address

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHT = ""
"""The slot of the weights themselves; the others are Adam's."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, start + count) of a flattened parameter, which lie at [at, at + count) of `holder` and of what
    the optimizer keeps of it."""

    holder: torch.Tensor
    at: int
    start: int
    count: int


class Shards:
    """This rank's pieces of an engine's parameters, by name. `shapes`: of the whole parameters."""

    def __init__(self, engine: Any, stage: int, rank: int, shapes: Mapping[str, torch.Size]) -> None:
        self._rank, self._shapes, self._stage = rank, dict(shapes), stage
        self._optimizer: torch.optim.Optimizer = engine.optimizer if stage == 0 else engine.optimizer.optimizer
        parameters = dict(engine.module.named_parameters())
        self._holders = _holders(engine.optimizer, stage, list(parameters.values()))
        self._fragments = {
            name: fragment
            for name, shape in shapes.items()
            if (fragment := _fragment(engine.optimizer, stage, rank, parameters[name], shape.numel())) is not None
        }

    def write_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Overwrites the fp32 masters, which DeepSpeed copies from the low-precision model."""
        with torch.no_grad():
            for name, fragment in self._fragments.items():
                _piece(fragment.holder, fragment).copy_(_part(weights[name], fragment))

    def write_moments(self, moments: Mapping[str, Mapping[str, torch.Tensor]], step: int) -> None:
        """Makes the optimizer go on after `step` steps."""
        with torch.no_grad():
            for holder in self._holders:
                self._optimizer.state[holder] = {
                    "step": torch.tensor(float(step)),
                    **{slot: torch.zeros_like(holder) for slot in moments},
                }
            for slot, tensors in moments.items():
                for name, fragment in self._fragments.items():
                    moment = self._optimizer.state[fragment.holder][slot]
                    _piece(moment, fragment).copy_(_part(tensors[name], fragment))

    def gather(self, slots: tuple[str, ...]) -> dict[str, dict[str, torch.Tensor]]:
        """Whole fp32 tensors on the CPU of rank 0 by slot and name; empty elsewhere. All ranks call it."""
        return {slot: dict(self._gather(slot)) for slot in slots}

    @property
    def slots(self) -> tuple[str, ...]:
        """What there is to gather: the moments too, after a first step. The same on every rank."""
        return (WEIGHT, *MOMENTS) if self._optimizer.state else (WEIGHT,)

    def _gather(self, slot: str) -> Iterator[tuple[str, torch.Tensor]]:
        for names in buckets(self._shapes, lambda name: self._shapes[name].numel()):
            sizes = [self._shapes[name].numel() for name in names]
            flat = torch.zeros(sum(sizes))
            for name, part in zip(names, flat.split(sizes), strict=True):
                fragment = self._fragments.get(name)
                if fragment is not None and (self._stage > 0 or self._rank == 0):
                    tensor = fragment.holder if slot == WEIGHT else self._optimizer.state[fragment.holder][slot]
                    _part(part, fragment).copy_(_piece(tensor.detach(), fragment))
            if self._stage > 0:
                dist.reduce(flat, dst=0)
            if self._rank == 0:
                for name, part in zip(names, flat.split(sizes), strict=True):
                    yield name, part.view(self._shapes[name]).clone()


def _holders(optimizer: Any, stage: int, parameters: list[Any]) -> list[Any]:
    if stage == 0:
        return parameters
    return list(optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups)


def _fragment(optimizer: Any, stage: int, rank: int, parameter: Any, size: int) -> Fragment | None:
    if stage == 0:
        return Fragment(parameter, 0, 0, size)
    if stage < 3:
        mapping = fp32_address(parameter)
        if mapping is None:
            return None
        here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
        return Fragment(optimizer.single_partition_of_fp32_groups[0], there.start, here.start, here.numel)
    group, at, share = optimizer.grad_position[optimizer.get_param_id(parameter)]
    count = min(share, size - rank * share)
    return Fragment(optimizer.fp32_partitioned_groups_flat[group], at, rank * share, count) if count > 0 else None


def _piece(tensor: torch.Tensor, fragment: Fragment) -> torch.Tensor:
    return tensor.view(-1).narrow(0, fragment.at, fragment.count)


def _part(tensor: torch.Tensor, fragment: Fragment) -> torch.Tensor:
    return tensor.reshape(-1).narrow(0, fragment.start, fragment.count)
