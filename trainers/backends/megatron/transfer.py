"""Brings what the ranks hold of a model together on rank 0, as full Hugging Face tensors; and answers of the last
pipeline stage to all.

Of the ranks that hold copies of a parameter one sends it, parameter by parameter, in an order that both sides know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from millrace.trainers.backends.megatron.config import Architecture
from millrace.trainers.backends.megatron.groups import MegatronGroups
from millrace.trainers.backends.megatron.weights import Coordinates, drain, pieces, shapes
from millrace.trainers.backends.rank_messages import exchange


def collect(
    arch: Architecture,
    groups: MegatronGroups,
    model: torch.nn.Module,
    read: Callable[[torch.nn.Parameter], torch.Tensor],
    rank: int,
) -> dict[str, torch.Tensor]:
    """Full fp32 tensors on the CPU of rank 0, nothing elsewhere. `read` gives a whole local parameter (or a moment of
    it) and may be collective among its copies. All ranks call it together."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        copies = groups.dense if getattr(parameter, "allreduce", True) else groups.expert
        tensor = read(parameter)
        if dist.get_rank(copies) == 0:
            tensors[name] = tensor.detach().to("cpu", torch.float32, copy=True)
    entry = groups.place, [(name, tuple(x.shape)) for name, x in tensors.items()]
    listing = exchange(entry, tuple[Coordinates, list[tuple[str, tuple[int, ...]]]])
    out = {name: torch.zeros(shape) for name, shape in shapes(arch).items()} if rank == 0 else {}
    for source, (place, names) in enumerate(listing):
        for name, shape in names:
            if rank not in (0, source):
                continue
            if source == 0:
                local = tensors[name]
            elif rank == 0:
                local = torch.empty(shape)
                dist.recv(local, src=source)
            else:
                dist.send(tensors[name], dst=0)
                continue
            drain(local, pieces(arch, groups.layout, place, name), out)
    return out


def broadcast_scores(
    scores: list[torch.Tensor], sizes: Sequence[int], groups: MegatronGroups, device: torch.device
) -> list[torch.Tensor]:
    """What the last pipeline stage found, on every stage: float32 vectors of the given sizes."""
    if groups.layout.p == 1:
        return scores
    flat = torch.cat(scores).float() if groups.last else torch.empty(sum(sizes), device=device)
    dist.broadcast(flat, src=dist.get_global_rank(groups.pipeline, groups.layout.p - 1), group=groups.pipeline)
    return list(flat.split(list(sizes)))
