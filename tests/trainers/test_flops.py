"""Arithmetic of a model against counting by hand."""

from __future__ import annotations

import pytest
import torch

from millrace.apps.demo import tiny
from millrace.trainers import flops


def test_a_token_costs_six_times_the_weights_it_meets() -> None:
    state = tiny.random_state(0)
    shapes = [(name, tuple(tensor.shape)) for name, tensor in state.weights.items()]
    config = {"num_attention_heads": 3, "hidden_size": 96, "num_hidden_layers": 2}
    layer = 4 * 96 * 96 + 3 * 96 * 256
    head = 96 * 32
    assert flops.per_token(shapes, config, 0) == 6 * (2 * layer + head)
    # Scores and weighted values: two products of 96 per earlier token, of which a causal one sees half; thrice.
    assert flops.per_token(shapes, config, 10) - flops.per_token(shapes, config, 0) == 3 * 2 * 2 * 96 * 2 * 5
    tied = [(name, shape) for name, shape in shapes if name != "lm_head.weight"]
    assert flops.per_token(tied, {**config, "tie_word_embeddings": True}, 0) == flops.per_token(shapes, config, 0)


def test_a_token_visits_few_experts() -> None:
    config = {"num_attention_heads": 1, "hidden_size": 4, "num_hidden_layers": 1}
    config |= {"num_experts": 8, "num_experts_per_tok": 2}
    assert flops.per_token([("layers.0.mlp.experts.gate_up_proj", (8, 4, 4))], config, 0) == 6 * 2 * 16


def test_the_share_of_a_known_device() -> None:
    rate = flops.peak("NVIDIA H100 80GB HBM3")
    assert rate == 989e12
    assert flops.peak("NVIDIA H100 PCIe") == 756e12
    assert flops.peak("AMD EPYC 7763") is None
    assert flops.mfu(1000.0, 1e9, 1e12, 2) == pytest.approx(0.5)


def test_a_step_on_a_known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    state = tiny.random_state(0)
    metrics = {"tokens_computed": 200.0, "samples": 10.0, "tokens_per_second": 1e6}
    assert flops.utilisation(state, metrics, 2) == {}, "a CPU has no peak that is known"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    shapes = [(name, tuple(tensor.shape)) for name, tensor in state.weights.items()]
    config = {"num_attention_heads": 3, "hidden_size": 96, "num_hidden_layers": 2}
    expected = 1e6 * flops.per_token(shapes, config, 20) / (2 * 312e12)
    assert flops.utilisation(state, metrics, 2) == {"mfu": pytest.approx(expected)}
