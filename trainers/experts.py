"""The two ways to name the weights of experts.

Public checkpoints of mixture models name each expert's matrices by themselves; transformers holds those of a layer as
two tensors, and so do we:

    ...mlp.experts.K.gate_proj.weight [I, H], .up_proj.weight [I, H]   ->   ...mlp.experts.gate_up_proj [E, 2 I, H]
    ...mlp.experts.K.down_proj.weight [H, I]                           ->   ...mlp.experts.down_proj    [E, H, I]
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from millrace.trainers.errors import CheckpointError

_ONE = re.compile(r"(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<matrix>gate_proj|up_proj|down_proj)\.weight")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def fused(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`weights` with the experts of each layer together; those that are so already, and everything else, as they are.
    CheckpointError, naming the first, where experts of a layer are missing or differ in shape."""
    out: dict[str, torch.Tensor] = {}
    layers: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, tensor in weights.items():
        if match := _ONE.fullmatch(name):
            layers.setdefault(match["layer"], {})[int(match["expert"]), match["matrix"]] = tensor
        else:
            out[name] = tensor
    for layer, found in layers.items():
        experts = range(1 + max(expert for expert, _ in found))
        for whole, parts in _PARTS.items():
            out[f"{layer}.{whole}"] = _together(layer, found, experts, parts)
    return out


def _together(
    layer: str, found: dict[tuple[int, str], torch.Tensor], experts: range, parts: tuple[str, ...]
) -> torch.Tensor:
    """[E, ...] of one layer; takes its tensors out of `found`, so that no layer is held twice for long."""
    wanted = [(expert, part) for expert in experts for part in parts]
    for expert, part in wanted:
        if (expert, part) not in found:
            raise CheckpointError(f"the checkpoint has no {layer}.{expert}.{part}.weight; download it again")
    shapes = {part: found[0, part].shape for part in parts}
    for expert, part in wanted:
        if found[expert, part].shape != shapes[part]:
            raise CheckpointError(f"{layer}.{expert}.{part}.weight is not of the shape of expert 0; download it again")
    return torch.stack([torch.cat([found.pop((expert, part)) for part in parts]) for expert in experts])
