"""Expert parallelism: each rank has some experts of every layer, and tokens travel to theirs and back.

    route own tokens (replicated router) -> sort rows by expert -> exchange -> own experts -> exchange -> weighted sum

Nothing is dropped and nothing padded: ranks first tell each other how many rows come. Each expert's gradient is
complete on its rank but for the copies that other ranks of `edp` hold, which FSDP adds up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from millrace.trainers.backends.parallel.collectives import Team, exchange
from millrace.trainers.errors import BadConfiguration
from millrace.trainers.phase_clock import COLLECTIVES

UP, DOWN = "gate_up_proj", "down_proj"


def is_experts(module: nn.Module) -> bool:
    """Whether a module is a layer's experts, stacked: gate_up_proj [E, 2F, H], down_proj [E, H, F]."""
    return all(isinstance(getattr(module, name, None), nn.Parameter) for name in (UP, DOWN))


def names(model: PreTrainedModel) -> set[str]:
    """The parameters that belong to experts, all of them cut on dimension 0."""
    return {
        f"{at}.{name}"
        for at, module in model.named_modules()
        if is_experts(module)
        for name, _ in _parameters_of(module)
    }


def _parameters_of(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False))


def check(model: PreTrainedModel, size: int) -> None:
    """BadConfiguration, with the reason, unless the experts of a whole model divide over `size` ranks."""
    experts = [module for module in model.modules() if is_experts(module)]
    if not experts:
        raise BadConfiguration(f"{type(model).__name__} has no experts to spread over e{size}; choose e1")
    for module in experts:
        count = int(module.get_parameter(UP).shape[0])
        if count % size:
            raise BadConfiguration(f"{count} experts do not divide over e{size}; choose an e that divides them")
        more = [name for name, _ in _parameters_of(module) if name not in (UP, DOWN)]
        if more or not _is_plain(module):
            raise BadConfiguration(
                f"{type(module).__name__} computes otherwise than down(act(gate) * up) without biases; choose e1"
            )


def _is_plain(module: Any) -> bool:
    """Whether a layer's experts compute down(act(gate) * up): tried on a few rows."""
    up, down = module.get_parameter(UP)[:1], module.get_parameter(DOWN)[:1]
    hidden = torch.linspace(-2, 2, 4 * up.shape[-1], device=up.device, dtype=up.dtype).view(4, -1)
    with torch.no_grad():
        try:
            ours = _through(module.act_fn, hidden, up[0], down[0])
            first, whole = torch.zeros_like(hidden[:, :1], dtype=torch.int64), torch.ones_like(hidden[:, :1])
            theirs = module(hidden, first, whole)
        except (AttributeError, RuntimeError, TypeError, ValueError, IndexError):
            return False  # of another shape, or called otherwise
    return bool((ours - theirs).norm() <= 1e-3 * theirs.norm())


def _through(act: Any, rows: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Rows [N, H] through one expert."""
    gate, value = F.linear(rows, up.to(rows.dtype)).chunk(2, dim=-1)
    return F.linear(act(gate) * value, down.to(rows.dtype))


def apply(model: PreTrainedModel, team: Team) -> None:
    """Makes the experts of a model, whose parameters are already cut, compute for all ranks of `team`."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if is_experts(child):
                setattr(module, name, Experts(child, team))


class Experts(nn.Module):
    """Stands for a layer's experts of which this rank has every `team.size`th part."""

    def __init__(self, of: Any, team: Team) -> None:
        super().__init__()
        self.gate_up_proj: nn.Parameter = of.gate_up_proj
        self.down_proj: nn.Parameter = of.down_proj
        self.act_fn = of.act_fn
        self.count = team.size * int(of.gate_up_proj.shape[0])
        self.team = team

    def forward(self, hidden: torch.Tensor, routes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [N, H], chosen int64[N, k], weights [N, k] -> [N, H]."""
        fanout = routes.shape[1]
        flat = routes.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=self.count).view(self.team.size, -1)
        came = torch.empty_like(counts)
        with self.team.clock.phase(COLLECTIVES):
            dist.all_to_all_single(came, counts, group=self.team.group)
        out, back = [int(x) for x in counts.sum(1)], [int(x) for x in came.sum(1)]
        rows = exchange(hidden[order // fanout], out, back, self.team)
        rows = exchange(self._compute(rows, came), back, out, self.team)
        mixture = rows[torch.argsort(order)] * weights.reshape(-1, 1)
        return mixture.view(*routes.shape, -1).sum(1).to(hidden.dtype)

    def _compute(self, rows: torch.Tensor, came: torch.Tensor) -> torch.Tensor:
        """rows as they came, came[rank, expert] of them one after another."""
        experts = torch.arange(came.shape[1], device=rows.device).repeat(came.shape[0])
        by_expert = torch.argsort(experts.repeat_interleave(came.reshape(-1)), stable=True)
        parts = rows[by_expert].split([int(x) for x in came.sum(0)])
        own = zip(parts, self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)
        outputs = [_through(self.act_fn, part, up, down) for part, up, down in own]
        return torch.cat(outputs)[torch.argsort(by_expert)]
