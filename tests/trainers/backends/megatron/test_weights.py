"""The mapping between Hugging Face's and Megatron's parameters: nothing lost, nothing invented, under any layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.trainers.backends.layout import MEGATRON, Layout
from millrace.trainers.backends.megatron.config import Architecture, expert_tensor
from millrace.trainers.backends.megatron.weights import Coordinates, check_state, drain, fill, pieces, shapes
from millrace.trainers.errors import CheckpointError

DENSE = Architecture(
    layers=4,
    hidden=2,
    heads=8,
    groups=4,
    head=3,
    ffn=8,
    vocabulary=13,
    longest=64,
    eps=1e-6,
    theta=1e4,
    tied=False,
    qkv_bias=True,
    qk_norm=False,
)
SPARSE = replace(DENSE, qkv_bias=False, qk_norm=True, experts=4, experts_per_token=2)

architectures = st.builds(
    replace,
    st.sampled_from([DENSE, replace(DENSE, qkv_bias=False, qk_norm=True), SPARSE]),
    tied=st.booleans(),
    vocabulary=st.integers(1, 20),
    head=st.integers(1, 4),
    heads=st.sampled_from([4, 8, 12]),
    scalar=st.just(False),
) | st.sampled_from([replace(DENSE, scalar=True)])


@st.composite
def cut(draw: st.DrawFn) -> tuple[Architecture, Layout]:
    arch = draw(architectures)
    e = draw(st.sampled_from([1, 2, 4])) if arch.experts else 1
    etp = draw(st.sampled_from([1, 2])) if e > 1 else 1
    return arch, Layout(MEGATRON, 8, draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4])), 1, e, etp)


def everywhere(layout: Layout) -> Iterator[Coordinates]:
    sizes = (layout.t, layout.p, layout.e, expert_tensor(layout))
    return (Coordinates(*place) for place in product(*map(range, sizes)))


def held(arch: Architecture, layout: Layout, place: Coordinates) -> dict[str, tuple[int, ...]]:
    """Megatron's parameters at a place and their shapes, by what its layers are documented to hold."""
    h, heads, groups = arch.hidden, arch.heads // layout.t, arch.groups // layout.t
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(arch.layers // layout.p):
        at = f"decoder.layers.{layer}"
        rows = (heads + 2 * groups) * arch.head
        found[f"{at}.input_layernorm.weight"] = found[f"{at}.pre_mlp_layernorm.weight"] = (h,)
        found[f"{at}.self_attention.linear_qkv.weight"] = (rows, h)
        found[f"{at}.self_attention.linear_proj.weight"] = (h, heads * arch.head)
        if arch.qkv_bias:
            found[f"{at}.self_attention.linear_qkv.bias"] = (rows,)
        if arch.qk_norm:
            for one in "qk":
                found[f"{at}.self_attention.{one}_layernorm.weight"] = (arch.head,)
        if arch.experts:
            found[f"{at}.mlp.router.weight"] = (arch.experts, h)
            ffn = arch.ffn // expert_tensor(layout)
            for expert in range(arch.experts // layout.e):
                found[f"{at}.mlp.experts.local_experts.{expert}.linear_fc1.weight"] = (2 * ffn, h)
                found[f"{at}.mlp.experts.local_experts.{expert}.linear_fc2.weight"] = (h, ffn)
        else:
            found[f"{at}.mlp.linear_fc1.weight"] = (2 * arch.ffn // layout.t, h)
            found[f"{at}.mlp.linear_fc2.weight"] = (h, arch.ffn // layout.t)
    vocabulary = (-(-arch.vocabulary // layout.t), h)
    if place.p == 0:
        found["embedding.word_embeddings.weight"] = vocabulary
    if place.p == layout.p - 1:
        found["decoder.final_layernorm.weight"] = (h,)
        if arch.scalar:
            found["output_layer.weight"] = (1, h)
        elif not (arch.tied and layout.p == 1):
            found["output_layer.weight"] = vocabulary
    return found


def full_weights(arch: Architecture) -> dict[str, torch.Tensor]:
    """Every element another number."""
    weights, first = {}, 1
    for name, shape in shapes(arch).items():
        size = torch.Size(shape).numel()
        weights[name] = torch.arange(first, first + size, dtype=torch.float32).view(shape)
        first += size
    return weights


@settings(max_examples=40, deadline=None)
@given(cut())
def test_there_and_back(chosen: tuple[Architecture, Layout]) -> None:
    arch, layout = chosen
    full = full_weights(arch)
    check_state(arch, full)
    back = {name: torch.full_like(tensor, torch.nan) for name, tensor in full.items()}
    for place in everywhere(layout):
        for name, shape in held(arch, layout, place).items():
            local = torch.full(shape, torch.nan)
            found = pieces(arch, layout, place, name)
            fill(local, found, full)
            assert not local.isnan().any()
            invented = local[local != 0].numel() - local.unique()[local.unique() != 0].numel()
            assert invented == 0, "no element lies in two places of a parameter"
            drain(local, found, back)
    for name, tensor in full.items():
        assert torch.equal(back[name], tensor), name


@settings(max_examples=40, deadline=None)
@given(cut())
def test_only_the_padded_vocabulary_is_empty(chosen: tuple[Architecture, Layout]) -> None:
    arch, layout = chosen
    full = full_weights(arch)
    for place in everywhere(layout):
        for name, shape in held(arch, layout, place).items():
            local = torch.ones(shape)
            fill(local, pieces(arch, layout, place, name), full)
            rows = (local == 0).reshape(shape[0], -1).all(-1)
            first = place.t * shape[0]
            of_vocabulary = name.startswith("embedding") or (name.startswith("output") and not arch.scalar)
            expected = [of_vocabulary and first + row >= arch.vocabulary for row in range(shape[0])]
            assert rows.tolist() == expected, name


def test_queries_lie_beside_their_keys_and_values() -> None:
    """Two query heads a group, one element a head: q0 q1 k0 v0, q2 q3 k1 v1, and so on."""
    arch = replace(DENSE, head=1, hidden=1, qkv_bias=False)
    full = full_weights(arch)
    q, k, v = (full[f"model.layers.0.self_attn.{part}_proj.weight"][:, 0].tolist() for part in "qkv")
    local = torch.empty(8, 1)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    fill(local, pieces(arch, Layout(MEGATRON, t=2), Coordinates(t=1), name), full)
    assert local[:, 0].tolist() == [q[4], q[5], k[2], v[2], q[6], q[7], k[3], v[3]]


def test_the_gate_lies_above_the_other_half() -> None:
    arch = replace(DENSE, hidden=1)
    full = full_weights(arch)
    local = torch.empty(8, 1)
    fill(local, pieces(arch, Layout(MEGATRON, t=2), Coordinates(t=1), "decoder.layers.3.mlp.linear_fc1.weight"), full)
    halves = [full[f"model.layers.3.mlp.{half}_proj.weight"][4:] for half in ("gate", "up")]
    assert torch.equal(local, torch.cat(halves))


def test_layers_of_a_later_stage() -> None:
    full = full_weights(DENSE)
    local = torch.empty(2)
    layout = Layout(MEGATRON, p=2)
    fill(local, pieces(DENSE, layout, Coordinates(p=1), "decoder.layers.1.input_layernorm.weight"), full)
    assert torch.equal(local, full["model.layers.3.input_layernorm.weight"])


def test_what_does_not_fit_says_what() -> None:
    full = full_weights(DENSE)
    with pytest.raises(CheckpointError, match=r"missing \['lm_head.weight'\], unknown \['x'\]"):
        check_state(DENSE, {name.replace("lm_head.weight", "x"): tensor for name, tensor in full.items()})
    with pytest.raises(CheckpointError, match=r"model.norm.weight is \(7,\) in the weights, \(2,\) in config.json"):
        check_state(DENSE, full | {"model.norm.weight": torch.zeros(7)})
    with pytest.raises(CheckpointError, match="no Hugging Face tensor is known for Megatron's rotary"):
        pieces(DENSE, Layout(MEGATRON), Coordinates(), "rotary")
    with pytest.raises(CheckpointError, match=r"known for mlp.shared of Megatron's layers"):
        pieces(DENSE, Layout(MEGATRON), Coordinates(), "decoder.layers.0.mlp.shared")
