"""Cutting a model into stages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from millrace.trainers.backends.models.build import build
from millrace.trainers.backends.models.stages import PipelineStage, name_of
from millrace.trainers.batches.packing import MicroBatch, pack
from millrace.trainers.errors import BadConfiguration
from millrace.trainers.weights.state import State
from tests.support.samples import random_samples, small_state


@given(st.integers(1, 30), st.integers(1, 8))
def test_layers_are_shared_out_in_order(total: int, count: int) -> None:
    shares = [list(PipelineStage(index, count).layers(total)) for index in range(count)]
    assert [layer for share in shares for layer in share] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def stages(state: State, count: int) -> list[PreTrainedModel]:
    made = []
    for index in range(count):
        made.append(build(state.assets, state.weights, PipelineStage(index, count)))
    return made


def chain(models: list[PreTrainedModel], batch: MicroBatch) -> torch.Tensor:
    hidden = None
    for model in models:
        given = {"input_ids": batch.tokens} if hidden is None else {"inputs_embeds": hidden}
        hidden = model(
            position_ids=batch.positions,
            attention_mask=batch.tokens.new_zeros((1, 1, 1, 1)),
            use_cache=False,
            runs=batch.runs,
            **given,
        ).logits
    assert hidden is not None
    return hidden


SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2}
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize(("kind", "more"), [("qwen2", SLIDING), ("qwen3", {}), ("qwen3_moe", SPARSE)])
def test_stages_in_a_chain_are_the_model(kind: str, more: dict[str, object], count: int) -> None:
    """To the last bit; names and places of all parameters are those of the whole."""
    state, batch = small_state(kind, num_hidden_layers=5, **more), pack(random_samples(0, groups=1))
    whole = build(state.assets, state.weights)
    parts = stages(state, count)
    with torch.no_grad():
        assert torch.equal(chain(parts, batch), chain([whole], batch))
    found = {}
    for part in parts:
        for own, parameter in part.named_parameters():
            name = name_of(part, own)
            assert name not in found
            found[name] = parameter
    assert found.keys() == state.weights.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, state.weights[name])


def test_what_cannot_be_cut_is_refused_with_the_reason() -> None:
    state = small_state()
    with pytest.raises(BadConfiguration, match="2 layers make no 3 pipeline stages"):
        stages(state, 3)
    tied = small_state(tie_word_embeddings=True)
    with pytest.raises(BadConfiguration, match="ties its output to its input embeddings"):
        stages(tied, 2)
