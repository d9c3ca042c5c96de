"""Jobs for `ranks.Ranks`: micro-batches on the ranks of one cell."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from millrace.trainers.backends.models.build import build
from millrace.trainers.backends.models.forward import ForwardPass
from millrace.trainers.backends.models.stages import name_of
from millrace.trainers.backends.parallel import context as cp
from millrace.trainers.backends.parallel import pipeline as pp
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.packing import MicroBatch
from millrace.trainers.weights.state import State

Outcome = tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""Log-probabilities, entropies, squared norms of distributions, and gradients by name of a weighed sum of them."""


def _outcome(run: ForwardPass | cp.ContextPass) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs, entropy = run.tokens(0.7)
    squares, _ = run.comparison(1.0, lambda ours, theirs: (ours * theirs).sum(-1))
    weights = torch.linspace(-1, 2, len(logprobs))
    (logprobs @ weights + squares.sum()).backward()
    return logprobs.detach(), entropy, squares.detach()


def pass_alone(state: State, batch: MicroBatch) -> Outcome:
    """In one process."""
    model = build(state.assets, state.weights)
    found = _outcome(ForwardPass(model, batch, model))
    return (*found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def pass_together(
    backend: TorchBackend, rank: int, world: int, store: Store, state: State, batch: MicroBatch
) -> Outcome:
    """The same, its positions over all ranks."""
    backend.form(rank, world, store, 30.0)
    model = build(state.assets, state.weights)
    cp.spread(model, world)
    group = dist.group.WORLD
    assert group is not None
    found = _outcome(cp.context_pass(ForwardPass(model, batch, model), cp.Context(group, rank, world, backend.clock)))
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            gradients[name] = parameter.grad
    backend.tear_down()
    return (*found, gradients)


Losses = tuple[list[float], list[torch.Tensor], dict[str, torch.Tensor]]
"""Loss of each micro-batch, their log-probabilities, and gradients by name in the whole model."""


def micros_alone(state: State, batches: Sequence[MicroBatch]) -> Losses:
    """Negative log-likelihoods of micro-batches, their gradients added up, in one process."""
    model = build(state.assets, state.weights)
    losses, logprobs = [], []
    for batch in batches:
        found = ForwardPass(model, batch).tokens(1.0)[0]
        (-found.sum()).backward()
        losses.append(-float(found.detach().sum()))
        logprobs.append(found.detach())
    return losses, logprobs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def micros_piped(
    backend: TorchBackend,
    rank: int,
    world: int,
    store: Store,
    state: State,
    batches: Sequence[MicroBatch],
    schedule: str,
) -> Losses:
    """The same on a pipeline of all ranks: what this rank knows of it."""
    backend.form(rank, world, store, 30.0)
    group = dist.group.WORLD
    assert group is not None
    pipe = pp.Pipe(group, rank, world, schedule, backend.clock)
    models = [build(state.assets, state.weights, stage) for stage in pipe.own_stages]
    shapes = [(1, batch.tokens.shape[1], models[0].config.hidden_size) for batch in batches]
    found: dict[int, torch.Tensor] = {}

    def forward(chunk: int, micro: int, hidden: torch.Tensor | None) -> torch.Tensor:
        run = ForwardPass(models[chunk], batches[micro], fed=pp.stage_input(hidden))
        if not pipe.stage(chunk).last:
            return run.hidden()
        logprobs = run.tokens(1.0)[0]
        found[micro] = logprobs.detach()
        return -logprobs.sum()

    like = torch.zeros(0)
    scored = None
    with torch.no_grad():
        for micro, hidden in enumerate(pp.relay(pipe, shapes, like, forward)):
            forward(len(models) - 1, micro, hidden)
        if pipe.last:
            scored = [found[micro] for micro in range(len(batches))]
    told = pp.tell(pipe, scored, [batch.trainable for batch in batches], backend.device)
    pp.run(pipe, shapes, like, forward, lambda chunk, micro: None)
    losses = [-float(found[micro].sum()) for micro in range(len(batches))] if pipe.last else []
    gradients = {
        name_of(model, name): parameter.grad
        for model in models
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    backend.tear_down()
    return losses, told, gradients
