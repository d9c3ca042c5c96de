"""Odd settings of common families: what is saved, transformers reads whole, and it computes what packed rows do."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from millrace.trainers.backends.models.build import build
from millrace.trainers.backends.models.forward import ForwardPass
from millrace.trainers.batches.packing import pack
from millrace.trainers.weights import checkpoint
from tests.support.architectures import PLAIN, logprobs_alone, samples, tiny_state

KINDS = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "phi3",
    "gemma2",
    "gemma3_text",
    "glm4",
    "stablelm",
    "olmo2",
    "starcoder2",
)
KINDS += ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "smollm3", "cohere2", "granite")
NESTED = ("gemma3_text",)
"""kinds with rotary settings for each kind of layer"""
PLAIN_ROPE = ("mixtral",)
"""kinds whose other ropes transformers does not make, since their heads have no size of their own"""
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 16},
)
PARTS = {"phi3": 1.0, "glm4": 0.5, "stablelm": 0.5}
"""of a head that is turned, by kind"""


@st.composite
def models(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    kind = draw(st.sampled_from(KINDS))
    names = CONFIG_MAPPING[kind]().to_dict()
    choices: dict[str, st.SearchStrategy[Any]] = {
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
        "vocab_size": st.sampled_from((64, 67, 89)),
        "sliding_window": st.sampled_from((3, 8)),
        "use_sliding_window": st.booleans(),
        "final_logit_softcapping": st.sampled_from((None, 3.0)),
        "attn_logit_softcapping": st.sampled_from((None, 2.0)),
    }
    odd = {name: draw(choice) for name, choice in choices.items() if name in names}
    if kind not in (*NESTED, *PLAIN_ROPE) and draw(st.booleans()):
        rope = draw(st.sampled_from(ROPES)) | {"rope_theta": 1e4}
        odd["rope_parameters"] = rope | ({"partial_rotary_factor": PARTS[kind]} if kind in PARTS else {})
    return kind, odd | {"dtype": draw(st.sampled_from(("float32", "bfloat16")))}


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(models())
def test_odd_settings_come_back_whole(model: tuple[str, dict[str, Any]]) -> None:
    kind, odd = model
    with tempfile.TemporaryDirectory() as name:
        first, second = Path(name, "first"), Path(name, "second")
        state = tiny_state(kind, Path(name, "public"), **odd)
        config = json.loads(state.assets["config.json"]) | {"dtype": odd["dtype"]}
        checkpoint.export(first, replace(state, assets={"config.json": json.dumps(config).encode()}))
        state, batch = checkpoint.adopt(first), pack(samples())
        checkpoint.export(second, state)
        assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}
        plain, report = AutoModelForCausalLM.from_pretrained(first, output_loading_info=True, **PLAIN)
        assert not any(report.values())
        with torch.no_grad():
            ours = ForwardPass(build(state.assets, state.tensors).eval(), batch).tokens(1.0)[0]
        assert (ours - logprobs_alone(plain.eval(), batch)).abs().max() < 1e-5
