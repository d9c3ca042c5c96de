"""What Megatron is told of a Hugging Face model, and what it refuses."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from millrace.trainers.backends.factory import make_backend
from millrace.trainers.backends.layout import MEGATRON, Layout
from millrace.trainers.backends.megatron.config import Architecture, architecture, check
from millrace.trainers.backends.megatron.weights import check_state
from millrace.trainers.backends.models.build import with_scalar_head
from millrace.trainers.errors import BadConfiguration, CheckpointError
from tests.support.samples import small_state

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def of(kind: str, **settings: Any) -> Architecture:
    """Of a small model, whose own tensors must be the ones that Megatron expects."""
    state = small_state(kind, **settings)
    found = architecture(state.assets)
    check_state(found, state.weights)
    return found


def test_the_three_families() -> None:
    qwen2, qwen3 = of("qwen2"), of("qwen3")
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.experts) == (True, False, 0)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.experts) == (False, True, 0)
    assert (qwen2.layers, qwen2.hidden, qwen2.heads, qwen2.groups, qwen2.head, qwen2.ffn) == (2, 32, 4, 2, 8, 48)
    sparse = of("qwen3_moe", norm_topk_prob=False, **EXPERTS)
    assert (sparse.experts, sparse.experts_per_token, sparse.ffn, sparse.is_renormalising) == (4, 2, 16, False)
    assert of("qwen3_moe", norm_topk_prob=True, **EXPERTS).is_renormalising
    assert of("qwen3", tie_word_embeddings=True).tied
    assert of("qwen2", rope_parameters={"rope_theta": 5e5, "rope_type": "default"}).theta == 5e5


def test_a_value_model_has_a_head_of_one() -> None:
    critic = with_scalar_head(small_state("qwen3", tie_word_embeddings=True))
    found = architecture(critic.assets)
    assert found.scalar
    assert not found.tied
    check_state(found, critic.weights)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("llama", {}, "not llama; use a torch: layout"),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope of type linear",
        ),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "no sliding windows"),
        ("qwen3", {"hidden_act": "gelu"}, "no activation gelu"),
        ("qwen3", {"attention_bias": True}, "no attention biases beside Qwen2"),
        ("qwen3_moe", {"mlp_only_layers": [1], **EXPERTS}, "no dense layers between expert layers"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(kind: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadConfiguration, match=reason):
        architecture(small_state(kind, **settings).assets)


def test_a_state_without_config() -> None:
    with pytest.raises(CheckpointError, match=r"no config.json in the state"):
        architecture({"tokenizer.json": json.dumps({}).encode()})


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(MEGATRON, t=3), "2 key-value heads do not divide by t = 3"),
        (Layout(MEGATRON, p=3), "2 layers do not divide by p = 3"),
        (Layout(MEGATRON, d=2, e=2), "e = 2 needs a model with experts"),
    ],
)
def test_a_layout_that_the_model_does_not_divide_by(layout: Layout, reason: str) -> None:
    with pytest.raises(BadConfiguration, match=reason):
        check(of("qwen2"), layout)
    with pytest.raises(BadConfiguration, match="4 experts do not divide by e = 8"):
        check(of("qwen3_moe", **EXPERTS), Layout(MEGATRON, d=8, e=8))


@pytest.mark.slow
def test_ranks_that_make_no_layout() -> None:
    with pytest.raises(BadConfiguration, match="1 rank is too few: megatron with t2"):
        make_backend("megatron:d1t2").form(0, 1, None, 1.0)
    with pytest.raises(BadConfiguration, match="rank 2 is not in a world of 2"):
        make_backend("megatron:d2").form(2, 2, None, 1.0)
    with pytest.raises(BadConfiguration, match="2 ranks need a store"):
        make_backend("megatron:d2").form(0, 2, None, 1.0)


def test_without_its_package_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(BadConfiguration, match=r"megatron-core is not installed: run `make setup`"):
        make_backend("megatron:d1")
