"""Families that people train, each tiny: a step is trained, saved, and loaded by transformers' own means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from millrace.trainers.algorithms.sft import Sft
from millrace.trainers.backends.deepspeed.backend import DeepSpeedBackend
from millrace.trainers.backends.models.build import build, narrow_tables
from millrace.trainers.backends.models.forward import ForwardPass
from millrace.trainers.backends.models.stages import PipelineStage
from millrace.trainers.backends.parallel import experts, tensor
from millrace.trainers.batches.packing import pack
from millrace.trainers.errors import BadConfiguration
from millrace.trainers.learning import Schedule, Trainer
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.model_class import ANY_LENGTH, context_length
from millrace.trainers.weights.state import State
from tests.support.architectures import plain_logprobs, samples, tiny_state, train_and_reload

FIRST = ("mixtral", "deepseek_v3", "glm4_moe", "gemma4_text", "minimax_m2", "ernie4_5_moe", "bloom", "mpt", "apertus")
MORE = (
    *("deepseek_v32", "minimax", "granitemoehybrid", "afmoe", "dots1", "kimi_linear", "olmo_hybrid", "nemotron_h"),
    *("gpt_neox", "phimoe", "lfm2_moe", "gemma3n_text", "zamba2", "marian"),
)


@pytest.mark.parametrize("kind", [*FIRST, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)])
def test_what_is_trained_and_saved_is_what_transformers_loads(kind: str, tmp_path: Path) -> None:
    """Its log-probabilities, in rows as they train, are those of each sample alone; files and constants come back."""
    state = tiny_state(kind, tmp_path)
    reload = train_and_reload(state, tmp_path / "versions")
    assert (reload.ours - reload.theirs).abs().max() < 1e-5
    assert (reload.before - reload.theirs).abs().max() > 1e-4, "a step that changes nothing shows nothing"
    published, version = (load_file(path) for path in sorted(tmp_path.rglob("model.safetensors")))
    assert published.keys() == version.keys()


CONSTANTS = {
    "deepseek_v3": "model.layers.3.mlp.gate.e_score_correction_bias",
    "ernie4_5_moe": "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias",
    "gemma4_text": "model.layers.0.layer_scalar",
}


@pytest.mark.parametrize("kind", CONSTANTS)
def test_constants_are_kept_in_float32_and_count(kind: str, tmp_path: Path) -> None:
    """Buffers and frozen parameters alike: in a version of bf16 they are whole, and without them other numbers come."""
    state, name = tiny_state(kind, tmp_path), CONSTANTS[kind]
    value = state.constants[name] + 1e-4
    config = json.dumps(json.loads(state.assets["config.json"]) | {"dtype": "bfloat16"}).encode()
    state = State(state.weights, {"config.json": config}, constants={**state.constants, name: value})
    back = checkpoint.read(checkpoint.write(tmp_path / "versions", 0, state).path)
    assert torch.equal(back.constants[name], value)
    assert checkpoint.fingerprint(back) == checkpoint.fingerprint(state)
    model = build(state.assets, state.tensors)
    narrow_tables(model)
    assert torch.equal(model.get_buffer(name), value)
    other = State(state.weights, state.assets, constants={**state.constants, name: -5 * value})
    batch = pack(samples())
    assert not torch.allclose(plain_logprobs(state, batch), plain_logprobs(other, batch), atol=1e-3)


@pytest.mark.parametrize("options", [{"stage": 2, "bf16": True}, {"stage": 3}])
def test_deepspeed_leaves_constants_alone(options: dict[str, Any], tmp_path: Path) -> None:
    state = tiny_state("ernie4_5_moe", tmp_path)
    backend = DeepSpeedBackend(device="cpu", **options)
    backend.form(0, 1, None, 60.0)
    try:
        trainer = Trainer(backend, Sft(), Schedule(1e-3))
        trainer.load(state)
        trainer.train(samples(), minibatches=[[0, 1]], version=0)
        made = backend.gather()
    finally:
        backend.tear_down()
    assert made is not None
    assert made.weights.keys() == made.moments["exp_avg"].keys() == state.weights.keys()
    assert all(torch.equal(made.constants[name], tensor) for name, tensor in state.constants.items())


def test_experts_in_grouped_products_are_those_one_by_one(tmp_path: Path) -> None:
    """Gradients too: what trains is transformers' grouped product, what it is compared with the loop over experts."""
    state, batch = tiny_state("mixtral", tmp_path), pack(samples())
    gradients = []
    for implementation in ("grouped_mm", "eager"):
        model = build(state.assets, state.tensors)
        assert model.get_experts_implementation()[""] == "grouped_mm"
        model.set_experts_implementation(implementation)
        ForwardPass(model, batch).tokens(1.0)[0].sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gemma4_text", "longcat_flash", "gemma2"])
def test_pipeline_stages_that_compute_something_else_are_refused(kind: str, tmp_path: Path) -> None:
    """A table of all layers, another name of their count, a cap on logits: hidden states between stages."""
    state = tiny_state(kind, tmp_path, tie_word_embeddings=False)
    with pytest.raises(BadConfiguration, match=rf"{kind}\) .*stages.*: choose p1"):
        build(state.assets, state.tensors, PipelineStage(1, 2))


@pytest.mark.parametrize("kind", ["longcat_flash", "minimax_m3_vl_text"])
def test_experts_that_compute_something_else_are_not_spread(kind: str, tmp_path: Path) -> None:
    state = tiny_state(kind, tmp_path)
    with pytest.raises(BadConfiguration, match="Experts computes otherwise than"):
        experts.check(build(state.assets, state.tensors), 2)


def test_shared_experts_are_whole_under_tensor_parallelism(tmp_path: Path) -> None:
    state = tiny_state("qwen2_moe", tmp_path)
    model = build(state.assets, state.tensors)
    names = {name for name, _ in model.named_parameters() if ".mlp." in name}
    assert any("shared_expert." in name for name in names)
    assert not names & tensor.cuts(model).keys()


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_the_way_of_a_model_without_rotary_positions(kind: str, tmp_path: Path) -> None:
    state = tiny_state(kind, tmp_path)
    model = build(state.assets, state.tensors)
    assert context_length(model.config) == {"bloom": ANY_LENGTH, "mpt": 128}[kind]
