"""Jobs for `ranks.Ranks`: one micro-batch on the ranks of one cell."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from trainers.backends.forward import ForwardPass
from trainers.backends.fsdp import TorchBackend
from trainers.backends.models import build
from trainers.backends.parallel import context as cp
from trainers.batches.packing import Packed
from trainers.state import State

Outcome = tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""Log-probabilities, entropies, the distribution, and gradients by name of a weighed sum of them."""


def _outcome(run: ForwardPass | cp.ContextPass) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs, entropy = run.tokens(0.7)
    distribution = run.distribution(1.0)
    weights = torch.linspace(-1, 2, len(logprobs))
    (logprobs @ weights + (distribution * distribution).sum()).backward()
    return logprobs.detach(), entropy, distribution.detach()


def pass_alone(state: State, batch: Packed) -> Outcome:
    """In one process."""
    model = build(state.assets, state.weights)
    found = _outcome(ForwardPass(model, batch))
    return (*found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def pass_together(backend: TorchBackend, rank: int, world: int, store: Store, state: State, batch: Packed) -> Outcome:
    """The same, its positions over all ranks."""
    backend.form(rank, world, store, 30.0)
    model = build(state.assets, state.weights)
    model.config._attn_implementation = cp.NAME
    group = dist.group.WORLD
    assert group is not None
    found = _outcome(cp.context_pass(model, batch, cp.Context(group, rank, world, backend.clock)))
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            gradients[name] = parameter.grad
    backend.tear_down()
    return (*found, gradients)
