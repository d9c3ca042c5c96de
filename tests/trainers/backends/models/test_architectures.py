"""Every model is computed as plain `transformers` computes it, sample by sample, or refused by name."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.architectures import PAGE, WAYS, row
from millrace.trainers.algorithms.sft import Sft
from millrace.trainers.backends.layout import parse
from millrace.trainers.backends.models import probe
from millrace.trainers.backends.models.architectures import TESTED_KINDS
from millrace.trainers.backends.models.build import build
from millrace.trainers.backends.models.forward import ForwardPass
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.packing import cut, pack
from millrace.trainers.errors import BadConfiguration, BadSample, CheckpointError
from millrace.trainers.learning import Schedule, Trainer
from tests.support import logged
from tests.support.architectures import (
    EXACT,
    RIGHT,
    ROWS,
    judge,
    leak,
    plain_logprobs,
    samples,
    tiny_config,
    tiny_state,
)

SEVEN = {
    "qwen3": RIGHT,
    "qwen3_5_text": ROWS,
    "qwen3_next": ROWS,
    "lfm2": ROWS,
    "gpt_oss": RIGHT,
    "gemma2": RIGHT,
    "doge": ROWS,
}


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    """Each test finds out for itself."""
    probe._ways.clear()


@pytest.mark.parametrize("kind", SEVEN)
def test_packed_samples_have_the_numbers_that_transformers_gives_them_alone(kind: str, tmp_path: Path) -> None:
    state, batch = tiny_state(kind, tmp_path), pack(samples())
    model = build(state.assets, state.tensors).eval()
    with torch.no_grad():
        found = ForwardPass(model, batch).tokens(1.0)[0]
    assert (found - plain_logprobs(state, batch)).abs().max() < 2e-5
    assert leak(state) < 2e-5


SET = ("llama", "mistral", "olmo", "phi", "mamba", "jamba", "falcon", "bloom", "llama4_text", "qwen3_moe")
SET += ("gemma3", "qwen3_5", "recurrent_gemma", "roberta", "bigbird_pegasus")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*SEVEN, *SET])
def test_each_way_of_training_is_right_or_refused_by_name(kind: str, tmp_path: Path) -> None:
    verdict = judge(kind, tmp_path)
    said = [getattr(verdict, way) for way in WAYS]
    assert not [one for one in said if one.startswith(("WRONG", "BROKEN"))]
    assert row(kind, verdict) == page_rows()[kind]
    assert verdict.packed == SEVEN.get(kind, verdict.packed)
    assert verdict.packed in (RIGHT, ROWS)
    assert verdict.exact < EXACT


def page_rows() -> dict[str, str]:
    """The table of docs/architectures.md, by architecture."""
    lines = PAGE.read_text().splitlines()
    rows = lines[lines.index(next(line for line in lines if line.startswith("| architecture"))) + 2 :]
    return {line.split("|")[1].strip(): line for line in takewhile(bool, rows)}


def test_the_page_names_every_architecture_once_and_the_list_those_that_train() -> None:
    text, rows = PAGE.read_text(), page_rows()
    untested = {
        line[2:].partition(":")[0] for line in text.partition("## Untested")[2].splitlines() if line[:2] == "- "
    }
    assert not untested & rows.keys()
    assert untested | rows.keys() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert {kind for kind, line in rows.items() if line.split("|")[3].strip() in (RIGHT, ROWS)} == TESTED_KINDS
    assert f"`transformers` {transformers.__version__}," in text


def test_why_a_model_gets_rows_of_their_own_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = tiny_state("lfm2", tmp_path)
    with caplog.at_level(logging.WARNING, "millrace.models"):
        build(state.assets, state.tensors)
        build(state.assets, state.tensors)
    (line,) = [line for line in logged.lines(caplog, "millrace.models") if "row of its own" in line]
    assert "Lfm2ForCausalLM (lfm2)" in line
    assert "conv" in line


def test_a_state_along_the_row_trains_as_samples_alone_do(tmp_path: Path) -> None:
    """One step on a micro-batch of four equals one on four micro-batches of one."""
    state = tiny_state("qwen3_next", tmp_path)
    made = []
    for budget in (1000, 1):
        backend = TorchBackend(device="cpu")
        backend.form(0, 1, None, 60.0)
        trainer = Trainer(backend, Sft(), Schedule(1e-3), budget=budget)
        trainer.load(state)
        trainer.train(samples(), minibatches=[[0, 1]], version=0)
        gathered = backend.gather()
        assert gathered is not None
        made.append(gathered.moments["exp_avg"])
        backend.tear_down()
    for name, tensor in made[0].items():
        assert torch.allclose(tensor, made[1][name], atol=1e-6), name


def test_a_model_whose_tokens_see_later_ones_is_refused(tmp_path: Path) -> None:
    state = tiny_state("bert", tmp_path, is_decoder=False)
    with pytest.raises(BadConfiguration, match=r"BertLMHeadModel \(bert\): its tokens see later ones"):
        build(state.assets, state.tensors)


def test_rotary_embeddings_that_stretch_with_the_batch_are_refused(tmp_path: Path) -> None:
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "rope_theta": 1e4,
    }
    rope |= {"original_max_position_embeddings": 16}
    state = tiny_state("llama", tmp_path, rope_parameters=rope)
    with pytest.raises(BadConfiguration, match=r"longrope.*max_position_embeddings = 16"):
        build(state.assets, state.tensors)


def test_rotary_embeddings_of_one_kind_of_layer_that_stretch_are_refused(tmp_path: Path) -> None:
    stretch = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
    rope = {
        "full_attention": {**stretch, "original_max_position_embeddings": 16},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    state = tiny_state("gemma3_text", tmp_path, rope_parameters=rope)
    with pytest.raises(BadConfiguration, match=r"longrope.*max_position_embeddings = 16.*attention_factor = 1\.3"):
        build(state.assets, state.tensors)


def test_the_remedy_for_stretching_embeddings_leaves_the_numbers_of_short_samples(tmp_path: Path) -> None:
    stretch: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.5] * 4, "long_factor": [2.0] * 4}
    stretch |= {"rope_theta": 1e4, "original_max_position_embeddings": 20}
    state, batch = tiny_state("llama", tmp_path, rope_parameters=stretch), pack(samples())
    with pytest.raises(BadConfiguration) as refusal:
        build(state.assets, state.tensors)
    factor = float(str(refusal.value).rpartition(" = ")[2])
    config = json.loads(state.assets["config.json"]) | {"max_position_embeddings": 20}
    config["rope_parameters"] |= {"attention_factor": factor}
    model = build({"config.json": json.dumps(config).encode()}, state.tensors).eval()
    with torch.no_grad():
        ours = ForwardPass(model, batch).tokens(1.0)[0]
    assert (ours - plain_logprobs(state, batch)).abs().max() < 1e-5


def test_embeddings_that_grow_with_the_sample_meet_none_that_makes_them_grow(tmp_path: Path) -> None:
    """Dynamic NTK: frequencies change beyond the length that its backend takes, so no sample moves those beside it."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    state = tiny_state("llama", tmp_path, rope_parameters=rope, max_position_embeddings=17)
    longest = samples()
    assert max(sample.length for sample in longest) == 17
    batch = pack(longest)
    model = build(state.assets, state.tensors).eval()
    with torch.no_grad():
        assert (ForwardPass(model, batch).tokens(1.0)[0] - plain_logprobs(state, batch)).abs().max() < 1e-5
    assert leak(state) == 0
    state = tiny_state("llama", tmp_path / "short", rope_parameters=rope, max_position_embeddings=16)
    backend = TorchBackend(device="cpu")
    backend.form(0, 1, None, 60.0)
    trainer = Trainer(backend, Sft(), Schedule(1e-3))
    trainer.load(state)
    with pytest.raises(BadSample, match="17 tokens, the model takes 16"):
        trainer.train(longest, minibatches=[[0, 1]], version=0)
    backend.tear_down()


@pytest.mark.parametrize("kind", ["mixtral", "phimoe"])
def test_layers_that_draw_numbers_train_as_they_answer(kind: str, tmp_path: Path) -> None:
    """A jitter on hidden states; experts that are sampled."""
    state, batch = tiny_state(kind, tmp_path), pack(samples())
    model = build(state.assets, state.tensors)
    assert model.training
    with torch.no_grad():
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()
        tokens = batch.tokens[:, :13]
        assert not torch.equal(plain(input_ids=tokens).logits, plain(input_ids=tokens).logits)
    found = ForwardPass(model, batch).tokens(1.0)[0]
    assert (found.detach() - plain_logprobs(state, batch)).abs().max() < 1e-5
    found.sum().backward()
    gradients = [p.grad for name, p in model.named_parameters() if "down_proj" in name]
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients)


def test_a_model_that_rescales_itself_to_answer_keeps_its_weights(tmp_path: Path) -> None:
    state = tiny_state("rwkv", tmp_path)
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    model = build(state.assets, state.tensors)
    with torch.no_grad():
        ForwardPass(model.eval(), pack(samples())).tokens(1.0)
    held = dict(model.named_parameters())
    assert all(torch.equal(state.tensors[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(held[name], tensor) for name, tensor in before.items() if name in held)


def test_what_transformers_cannot_make_is_refused_with_its_reason() -> None:
    with pytest.raises(CheckpointError, match=r"makes no musicgen of this config.json.*MusicgenConfig"):
        build({"config.json": json.dumps(tiny_config("musicgen").to_dict()).encode()}, {})


def test_windows_wider_than_the_probe_are_tested_all_the_same(tmp_path: Path) -> None:
    """A window that is in the mask alone is not in packed rows."""
    state = tiny_state("llama4_text", tmp_path, attention_chunk_size=8)
    model = build(state.assets, state.tensors)
    assert probe.find(model, state.weights).attention != "millrace_packed"
    assert model.config.attention_chunk_size == 8


@pytest.mark.parametrize(("layout", "kind"), [("torch:d1t2", "lfm2"), ("torch:d1t2", "gpt_oss")])
def test_a_layout_that_cuts_what_must_stay_whole_is_refused(layout: str, kind: str, tmp_path: Path) -> None:
    from millrace.trainers.backends.torch.chunk import _check_cuts

    state = tiny_state(kind, tmp_path)
    with pytest.raises(BadConfiguration, match=rf"{layout}.*{kind}"):
        _check_cuts(build(state.assets, state.tensors), parse(layout))


def test_beginnings_are_not_shared_where_samples_have_rows_of_their_own(tmp_path: Path) -> None:
    state = tiny_state("lfm2", tmp_path)
    backend = TorchBackend(device="cpu")
    backend.form(0, 1, None, 60.0)
    trainer = Trainer(backend, Sft(), Schedule(1e-3), prefix_sharing=True)
    with pytest.raises(BadConfiguration, match="leave prefix_sharing out"):
        trainer.load(state)


def test_what_fills_rows_up_counts_in_the_budget() -> None:
    made = [replace(sample, seq=index) for index, sample in enumerate(samples(8))]
    micros = cut(made, 48, rows=True)
    assert sorted(s.trajectory for micro in micros for s in micro) == sorted(s.trajectory for s in made)
    assert all(len(micro) == 1 or len(micro) * max(s.length for s in micro) <= 48 for micro in micros)
    assert len(cut(made, 48)) < len(micros)


def test_an_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="model type 'no_such'"):
        build({"config.json": b'{"model_type": "no_such"}'}, {})


def test_weights_without_a_finite_number_are_not_compared(tmp_path: Path) -> None:
    state = tiny_state("qwen2", tmp_path)
    weights = {name: torch.full_like(tensor, torch.nan) for name, tensor in state.weights.items()}
    model = build(state.assets, weights)
    assert probe.find(model, weights).gap is None
