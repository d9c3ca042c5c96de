"""What public model directories hold otherwise than versions do, and how it becomes a version's.

Experts. Public checkpoints of mixture models name each expert's matrices by themselves; transformers holds those of a
layer as two tensors, and so do versions:

    ...mlp.experts.K.gate_proj.weight [I, H], .up_proj.weight [I, H]   ->   ...mlp.experts.gate_up_proj [E, 2 I, H]
    ...mlp.experts.K.down_proj.weight [H, I]                           ->   ...mlp.experts.down_proj    [E, H, I]

Chat templates. A version's files lie in no folder: a directory with `additional_chat_templates/` gives the same
templates under the same names in its tokenizer's settings, where transformers and the gateway read them too; a
directory of one template keeps its file.

Output matrix. A model that shares it with its input embeddings gets one of its own where its head alone shall change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from millrace.trainers.errors import CheckpointError
from millrace.trainers.weights.state import State

_ONE = re.compile(r"(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<matrix>gate_proj|up_proj|down_proj)\.weight")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def fuse_experts(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`weights` with the experts of each layer together; those that are so already, and everything else, as they are.
    CheckpointError, naming the first, where experts of a layer are missing or differ in shape."""
    out: dict[str, torch.Tensor] = {}
    layers: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, tensor in weights.items():
        if match := _ONE.fullmatch(name):
            layers.setdefault(match["layer"], {})[int(match["expert"]), match["matrix"]] = tensor
        else:
            out[name] = tensor
    for layer, matrices in layers.items():
        experts = range(1 + max(expert for expert, _ in matrices))
        for name_of_all, parts in _PARTS.items():
            out[f"{layer}.{name_of_all}"] = _together(layer, matrices, experts, parts)
    return out


def _together(
    layer: str, matrices: dict[tuple[int, str], torch.Tensor], experts: range, parts: tuple[str, ...]
) -> torch.Tensor:
    """[E, ...] of one layer; takes its tensors out of `found`, so that no layer is held twice for long."""
    keys = [(expert, part) for expert in experts for part in parts]
    for expert, part in keys:
        if (expert, part) not in matrices:
            raise CheckpointError(f"the checkpoint has no {layer}.{expert}.{part}.weight; download it again")
    shapes = {part: matrices[0, part].shape for part in parts}
    for expert, part in keys:
        if matrices[expert, part].shape != shapes[part]:
            raise CheckpointError(f"{layer}.{expert}.{part}.weight is not of the shape of expert 0; download it again")
    return torch.stack([torch.cat([matrices.pop((expert, part)) for part in parts]) for expert in experts])


_TEMPLATES_FOLDER = "additional_chat_templates"
_DEFAULT_TEMPLATE = "chat_template.jinja"
_TOKENIZER = "tokenizer_config.json"


def flatten_templates(directory: Path, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a version that starts from `directory`, whose own plain files are `files`."""
    templates = {path.stem: path.read_text() for path in sorted((directory / _TEMPLATES_FOLDER).glob("*.jinja"))}
    if not templates:
        return dict(files)
    out = dict(files)
    default = out.pop(_DEFAULT_TEMPLATE, None)
    if default is not None:
        templates = {"default": default.decode(), **templates}
    settings = json.loads(out.get(_TOKENIZER, b"{}"))
    settings["chat_template"] = [{"name": name, "template": template} for name, template in templates.items()]
    out[_TOKENIZER] = (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    return out


_EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"


def untie(state: State) -> State:
    """The same model, step for step the same numbers at first; what has a head of its own already is as it was. Raises
    CheckpointError where its input embeddings are not found."""
    settings = json.loads(state.assets["config.json"])
    if OUTPUT in state.weights and not settings.get("tie_word_embeddings"):
        return state
    names = [name for name in state.weights if name.endswith(_EMBEDDING)]
    if len(names) != 1:
        raise CheckpointError(f"{len(names)} of its weights end in {_EMBEDDING}: untie this model by its own means")
    settings["tie_word_embeddings"] = False
    assets = {**state.assets, "config.json": (json.dumps(settings, indent=2) + "\n").encode()}
    return replace(
        state, weights={**state.weights, OUTPUT: state.weights[names[0]].clone()}, assets=assets, source=None
    )
