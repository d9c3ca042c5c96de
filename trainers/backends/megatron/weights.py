"""Where each element of a Megatron parameter lies in the Hugging Face tensors. Pure: names, shapes and slices.

    Megatron, on one rank                 Hugging Face
    linear_qkv                            per key-value group: its query heads, its key, its value
    linear_fc1                            gate on top of up
    linear_proj, linear_fc2               columns
    word_embeddings, output_layer         rows of a vocabulary that is padded to a multiple of t
    experts.local_experts.j               expert j + what the lower expert ranks hold, of one fused tensor

The same pieces move weights and Adam's moments, in both directions. Invariant: over all ranks, pieces cover every
Hugging Face element; where ranks hold copies (norms, tied embeddings), the copies are equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from millrace.trainers.backends.layout import Layout
from millrace.trainers.backends.megatron.config import Architecture, expert_tensor
from millrace.trainers.backends.models.build import HEAD, SCORE
from millrace.trainers.errors import CheckpointError

Index = tuple[int | slice, ...]

EMBEDDING, FINAL_NORM = "model.embed_tokens.weight", "model.norm.weight"


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Of a rank in the dimensions that cut parameters."""

    t: int = 0
    p: int = 0
    e: int = 0
    expert_t: int = 0
    """which part of each of its experts"""


@dataclass(frozen=True, slots=True)
class Piece:
    """local[at] is full[name][of]."""

    name: str
    of: Index
    at: Index


def shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every Hugging Face tensor, in their model's order."""
    wide, narrow, h, f = arch.heads * arch.head, arch.groups * arch.head, arch.hidden, arch.ffn
    out: dict[str, tuple[int, ...]] = {EMBEDDING: (arch.vocabulary, h)}
    for layer in range(arch.layers):
        attention = f"model.layers.{layer}.self_attn"
        for name, rows in (("q", wide), ("k", narrow), ("v", narrow)):
            out[f"{attention}.{name}_proj.weight"] = (rows, h)
            if arch.qkv_bias:
                out[f"{attention}.{name}_proj.bias"] = (rows,)
        out[f"{attention}.o_proj.weight"] = (h, wide)
        if arch.qk_norm:
            out[f"{attention}.q_norm.weight"] = out[f"{attention}.k_norm.weight"] = (arch.head,)
        mlp = f"model.layers.{layer}.mlp"
        if arch.experts:
            out[f"{mlp}.experts.gate_up_proj"] = (arch.experts, 2 * f, h)
            out[f"{mlp}.experts.down_proj"] = (arch.experts, h, f)
            out[f"{mlp}.gate.weight"] = (arch.experts, h)
        else:
            out[f"{mlp}.gate_proj.weight"] = out[f"{mlp}.up_proj.weight"] = (f, h)
            out[f"{mlp}.down_proj.weight"] = (h, f)
        out[f"model.layers.{layer}.input_layernorm.weight"] = (h,)
        out[f"model.layers.{layer}.post_attention_layernorm.weight"] = (h,)
    out[FINAL_NORM] = (h,)
    if arch.scalar:
        out[SCORE] = (1, h)
    elif not arch.tied:
        out[HEAD] = (arch.vocabulary, h)
    return out


def check_state(arch: Architecture, weights: Mapping[str, torch.Tensor]) -> None:
    """CheckpointError unless `weights` are exactly the model's."""
    by_name = shapes(arch)
    missing, unknown = sorted(by_name.keys() - weights.keys()), sorted(weights.keys() - by_name.keys())
    if missing or unknown:
        raise CheckpointError(
            f"weights do not fit config.json: missing {missing[:3]}, unknown {unknown[:3]}; both must be of one model"
        )
    for name, shape in by_name.items():
        if tuple(weights[name].shape) != shape:
            raise CheckpointError(f"{name} is {tuple(weights[name].shape)} in the weights, {shape} in config.json")


def pieces(arch: Architecture, layout: Layout, place: Coordinates, name: str) -> list[Piece]:
    """What makes up the parameter that Megatron calls `name` on the rank at `place`."""
    if name == "embedding.word_embeddings.weight":
        return _vocabulary(arch, layout, place, EMBEDDING)
    if name == "output_layer.weight":
        if arch.scalar:
            return [_full_piece(SCORE)]
        return _vocabulary(arch, layout, place, EMBEDDING if arch.tied else HEAD)
    if name == "decoder.final_layernorm.weight":
        return [_full_piece(FINAL_NORM)]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None:
        raise CheckpointError(f"no Hugging Face tensor is known for Megatron's {name}")
    layer = int(match[1]) + place.p * (arch.layers // layout.p)
    return _in_layer(arch, layout, place, f"model.layers.{layer}", match[2])


def _in_layer(arch: Architecture, layout: Layout, place: Coordinates, layer: str, name: str) -> list[Piece]:
    renames = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "mlp.router.weight": "mlp.gate.weight",
    }
    if name in renames:
        return [_full_piece(f"{layer}.{renames[name]}")]
    if name.startswith("self_attention.linear_qkv."):
        return _qkv(arch, layout, place, f"{layer}.self_attn", name.rpartition(".")[2])
    if name == "self_attention.linear_proj.weight":
        return [_columns(f"{layer}.self_attn.o_proj.weight", arch.heads * arch.head, layout.t, place.t)]
    if name == "mlp.linear_fc1.weight":
        lo, hi = _share(arch.ffn, layout.t, place.t)
        gate, up = f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight"
        return _stack([(gate, (slice(lo, hi),), hi - lo), (up, (slice(lo, hi),), hi - lo)])
    if name == "mlp.linear_fc2.weight":
        return [_columns(f"{layer}.mlp.down_proj.weight", arch.ffn, layout.t, place.t)]
    match = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.linear_(fc1|fc2)\.weight", name)
    if match is None:
        raise CheckpointError(f"no Hugging Face tensor is known for {name} of Megatron's layers")
    return _expert(arch, layout, place, f"{layer}.mlp.experts", int(match[1]), match[2])


def _expert(arch: Architecture, layout: Layout, place: Coordinates, experts: str, local: int, part: str) -> list[Piece]:
    expert = place.e * (arch.experts // layout.e) + local
    lo, hi = _share(arch.ffn, expert_tensor(layout), place.expert_t)
    if part == "fc2":
        return [Piece(f"{experts}.down_proj", (expert, slice(None), slice(lo, hi)), (slice(None),))]
    gate, up = ((expert, slice(base + lo, base + hi)) for base in (0, arch.ffn))
    return _stack([(f"{experts}.gate_up_proj", rows, hi - lo) for rows in (gate, up)])


def _qkv(arch: Architecture, layout: Layout, place: Coordinates, attention: str, kind: str) -> list[Piece]:
    queries, d = arch.heads // arch.groups * arch.head, arch.head
    parts: list[tuple[str, Index, int]] = []
    for group in range(*_share(arch.groups, layout.t, place.t)):
        parts.append((f"{attention}.q_proj.{kind}", (slice(group * queries, (group + 1) * queries),), queries))
        for part in "kv":
            parts.append((f"{attention}.{part}_proj.{kind}", (slice(group * d, (group + 1) * d),), d))
    return _stack(parts)


def _stack(parts: list[tuple[str, Index, int]]) -> list[Piece]:
    """Parts of (name, index, rows), one below the other."""
    pieces, row = [], 0
    for name, of, rows in parts:
        pieces.append(Piece(name, of, (slice(row, row + rows),)))
        row += rows
    return pieces


def _full_piece(name: str) -> Piece:
    return Piece(name, (slice(None),), (slice(None),))


def _columns(name: str, size: int, world: int, rank: int) -> Piece:
    return Piece(name, (slice(None), slice(*_share(size, world, rank))), (slice(None),))


def _vocabulary(arch: Architecture, layout: Layout, place: Coordinates, name: str) -> list[Piece]:
    lo, hi = _share(arch.padded_size(layout), layout.t, place.t)
    hi = max(lo, min(hi, arch.vocabulary))
    return [Piece(name, (slice(lo, hi),), (slice(0, hi - lo),))]


def _share(size: int, world: int, rank: int) -> tuple[int, int]:
    width = size // world
    return rank * width, (rank + 1) * width


def fill(local: torch.Tensor, pieces: list[Piece], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copies a parameter's pieces in; what no piece covers (padding) becomes zero. In place."""
    with torch.no_grad():
        local.zero_()
        for piece in pieces:
            local[piece.at] = tensors[piece.name][piece.of].to(local)


def drain(local: torch.Tensor, pieces: list[Piece], tensors: Mapping[str, torch.Tensor]) -> None:
    """The way back: copies a parameter's pieces out into the full tensors. In place."""
    for piece in pieces:
        tensors[piece.name][piece.of] = local[piece.at].to(tensors[piece.name])
