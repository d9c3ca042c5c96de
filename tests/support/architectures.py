"""Tiny random models of the architectures of `transformers`, and what each backend makes of them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForTokenClassification, PretrainedConfig

from millrace.trainers.algorithms.sft import Sft
from millrace.trainers.backends.deepspeed.backend import DeepSpeedBackend
from millrace.trainers.backends.megatron.config import architecture
from millrace.trainers.backends.models import rows
from millrace.trainers.backends.models.build import SCORE, build, inference_mode, with_scalar_head
from millrace.trainers.backends.models.forward import ForwardPass
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.backends.torch.compute import Compute
from millrace.trainers.batches.packing import MicroBatch, pack
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import TrainerError
from millrace.trainers.learning import Schedule, Trainer
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.adapter import TARGETS, B, Lora
from millrace.trainers.weights.lora import attach, merge, prepare
from millrace.trainers.weights.model_class import learns, make, read_config, tensors_of
from millrace.trainers.weights.state import State

VOCABULARY = 64
LARGEST = 3_000_000
"""parameters of a tiny model; what stays larger is not tested"""
TOLERANCE = 1e-5
"""distance of log-probabilities in float32"""
EXACT, ROUNDING = 1e-9, 5e-5
"""distance of log-probabilities in float64, and in float32 where the former shows that it is rounding"""

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
_ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("prophetnet", "rembert", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta", "xlm-roberta-xl"),
)
_GEMMA = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
_GEMMA |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
_MLA = ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3")
_BYTES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_BYTES |= {"vocab_size": VOCABULARY, "max_position_embeddings": 128}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_MUSIC = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}}
_MUSIC |= {"decoder": {"model_type": "musicgen_decoder"}}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIGHT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_SIGHT |= {"image_size": 8, "patch_size": 4, "num_channels": 3}
SPECIAL: Mapping[str, dict[str, Any]] = {
    **{kind: {"num_key_value_heads": 4} for kind in (*_MLA, "youtu")},
    **{kind: {"head_dim": 8} for kind in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **{
        kind: {"layer_types": ["linear_attention", "full_attention"] * 2}
        for kind in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
    },
    **{kind: {"is_decoder": True} for kind in _ENCODERS},
    "codegen": {"rotary_dim": 8},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "gemma3n_text": {**_GEMMA, "laurel_rank": 8, "intermediate_size": [48] * 4, "num_kv_shared_layers": 2},
    "gemma4_text": {**_GEMMA, "global_head_dim": 16},
    "gemma2": {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 5.0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 4},
    "gptj": {"rotary_dim": 4},
    "kimi_linear": {
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_token": 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "longcat_flash": {"num_key_value_heads": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 16},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1},
    "nemotron_h": {
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 16,
    },
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "patcher_config": _BYTES,
        "global_config": {**_BYTES, "hidden_size": 64},
        **{key: {**_BYTES, "hidden_size_global": 64} for key in ("encoder_config", "decoder_config")},
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"sliding_attention": _MROPE, "full_attention": _MROPE},
    },
    "cpmant": {"dim_head": 8, "dim_ff": 48, "prompt_types": 4, "prompt_length": 4, "position_bias_num_buckets": 16},
    "emu3": {
        "text_config": {**_BYTES, "num_key_value_heads": 2, **_TOKENS},
        "vq_config": dict.fromkeys(("base_channels", "hidden_size"), 32)
        | {"codebook_size": 8, "channel_multiplier": [1, 1], "num_res_blocks": 1, "attn_resolutions": []},
        "vocabulary_map": {"<image>": 60},
    },
    "git": {"vision_config": _SIGHT},
    "mllama": {
        "text_config": {**_BYTES, "num_key_value_heads": 2, "cross_attention_layers": [1], **_TOKENS},
        "vision_config": {**_SIGHT, "num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 32}
        | {"intermediate_layers_indices": [0]},
        "image_token_index": 60,
    },
    "phi4_multimodal": {
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        "vision_config": {**_SIGHT, "num_hidden_layers": 2, "crop_size": 8},
        "audio_config": {"num_blocks": 2, "num_attention_heads": 2}
        | dict.fromkeys(("hidden_size", "intermediate_size", "ext_pw_out_channel"), 16)
        | dict.fromkeys(("depthwise_separable_out_channel", "nemo_conv_channels"), 16),
    },
    "qwen4_exp_text": {"hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
    | {"indexer_budget": 8, "indexer_compress_ratio": 2},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "local"],
        "axial_pos_embds": False,
        "attention_head_size": 8,
        "feed_forward_size": 48,
    },
    "roc_bert": {"is_decoder": True}
    | dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size"), 16)
    | dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim"), 16),
    "rwkv": {"rescale_every": 2},
    "gemma4_assistant": {
        "text_config": {**_BYTES, "model_type": "gemma4_text", "hidden_size_per_layer_input": 0}
        | {"vocab_size_per_layer_input": 0}
    },
    "musicgen": _MUSIC,
    "musicgen_melody": _MUSIC,
    "xlm": {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "causal": True},
    "zamba": {"layers_block_type": ["linear_attention"] * 2 + ["hybrid"] * 2, "num_key_value_heads": 4}
    | {"attention_head_dim": 16},
    "mixtral": {"router_jitter_noise": 0.1},
    "xmod": {"is_decoder": True, "languages": ["en_XX"], "default_language": "en_XX"},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "layer_types": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""What a kind needs beside `SIZES`."""

_QWEN_SIGHT = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
_QWEN_SIGHT |= {"num_position_embeddings": 16, "patch_size": 4}
_QWEN = {"vision_config": _QWEN_SIGHT, "image_token_id": 60, "video_token_id": 59}
_QWEN |= {"vision_start_token_id": 61, "vision_end_token_id": 62}
_GEMMA4 = {"vision_config": None, "audio_config": None, "image_token_id": 60, "audio_token_id": 59}
_GEMMA4 |= {"video_token_id": 58}
_BORDERS = {"image_token_index": 60, "boi_token_index": 61, "eoi_token_index": 62}
WITH_TEXT: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"vision_config": _SIGHT, "mm_tokens_per_image": 4, **_BORDERS}),
    "gemma4": ("gemma4_text", {**_GEMMA4, "boi_token_id": 61, "eoi_token_id": 62}),
    "gemma4_unified": ("gemma4_unified_text", _GEMMA4),
    "llama4": (
        "llama4_text",
        {
            "vision_config": {**_SIGHT, **dict.fromkeys(("vision_output_dim", "projector_output_dim"), 16)}
            | {"projector_input_dim": 16},
            **_BORDERS,
        },
    ),
    "gemma4_unified_assistant": ("gemma4_unified_text", {"backbone_hidden_size": 32}),
    "got_ocr2": (
        "qwen2",
        {
            "vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
            | {"patch_size": 4, "mlp_dim": 16, "output_channels": 16, "window_size": 2, "global_attn_indexes": [0]},
            "image_token_index": 60,
        },
    ),
    "qwen3_5": ("qwen3_5_text", _QWEN),
    "qwen3_5_moe": ("qwen3_5_moe_text", _QWEN),
    "qwen4_exp": ("qwen4_exp_text", _QWEN),
}
"""Kinds that read more than text: the kind of their text, and what they need beside it."""


def tiny_config(kind: str, **settings: Any) -> PretrainedConfig:
    """A small configuration of this model type; whatever its class raises where it cannot be made small."""
    made = CONFIG_MAPPING[kind]
    if kind in WITH_TEXT:
        text, beside = WITH_TEXT[kind]
        settings = {"text_config": tiny_config(text).to_dict(), **beside, **settings}
    default = {} if made.has_no_defaults_at_init else made().to_dict()
    names = set(inspect.signature(made.__init__).parameters) | set(default)
    small = {name: value for name, value in SIZES.items() if name in names and default.get(name, 0) is not None}
    config: PretrainedConfig = made(**{**small, **deepcopy(SPECIAL.get(kind, {})), **settings})
    return config


def tiny_state(kind: str, directory: Path, **settings: Any) -> State:
    """A random model as its own class writes it to disk, adopted. Every parameter is noisy, so that what is left out
    shows."""
    config = tiny_config(kind, **settings)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in make(json.loads(config.to_json_string())).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f}M parameters, however small its settings")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in tensors_of(model).items():
            if learns(tensor) or name.endswith(("_bias", "_biases", "_scalar")):  # not tables of sines or decays
                tensor.add_(0.2 * torch.randn_like(tensor))
    model.save_pretrained(directory)
    return checkpoint.adopt(directory)


def samples(count: int = 4, seed: int = 0) -> list[Sample]:
    """Of unequal lengths, two of them equal, all longer than the windows of tiny models."""
    draw = np.random.default_rng(seed)
    made = []
    for index in range(count):
        size = (13, 7, 7, 17)[index % 4]
        mask = np.array([0, 0, *(draw.random(size - 3) < 0.7), 1], np.uint8)
        made.append(
            Sample(
                tokens=draw.integers(3, VOCABULARY, size).astype(np.int32),
                mask=mask,
                logprobs=np.where(mask, -4.0, 0.0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                reward=float(index % 2),
                seq=index // 2,
                group=str(index // 2),
                trajectory=str(index),
            )
        )
    return made


PLAIN = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
"""transformers with nothing of ours and no kernel: attention and experts written out by each model"""


def plain_logprobs(state: State, batch: MicroBatch) -> torch.Tensor:
    """float32[M] of plain `transformers`, eager, each sample alone."""
    return logprobs_alone(plain_model(state), batch)


def plain_model(state: State) -> Any:
    """The model of plain `transformers`, eager."""
    config = read_config(json.loads(state.assets["config.json"]))
    if hasattr(config, "rescale_every"):
        config.rescale_every = 0  # as rwkv trains; to answer, it halves what its last norm is given
    model = AutoModelForCausalLM.from_config(config, **PLAIN).eval()
    model.load_state_dict(state.tensors, strict=False)
    model.tie_weights()
    return model


def logprobs_alone(model: Any, batch: MicroBatch) -> torch.Tensor:
    """float32[M] of a model of transformers, each sample alone."""
    found = []
    with torch.no_grad():
        for member in batch.members:
            tokens = torch.from_numpy(member.tokens.astype(np.int64))[None]
            scores = torch.log_softmax(model(input_ids=tokens, use_cache=False).logits[0].float(), -1)
            at = np.flatnonzero(member.mask)
            found.append(scores[at - 1, tokens[0, at]])
    return torch.cat(found)


def plain_values(state: State, batch: MicroBatch) -> torch.Tensor:
    """float32[T] of plain `transformers`' token classifier, eager, each sample alone."""
    config = read_config(json.loads(state.assets["config.json"]))
    config.num_labels = 1
    model = AutoModelForTokenClassification.from_config(config, **PLAIN).eval()
    model.load_state_dict({name: w for name, w in state.tensors.items() if name != SCORE}, strict=False)
    model.score = torch.nn.Linear(state.weights[SCORE].shape[1], 1, bias=False)
    model.score.weight.data.copy_(state.weights[SCORE])
    found = []
    with torch.no_grad():
        for member in batch.members:
            tokens = torch.from_numpy(member.tokens.astype(np.int64))[None]
            found.append(model(input_ids=tokens, use_cache=False).logits[0, :, 0])
    return torch.cat(found)


RIGHT, ROWS = "right", "own rows"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What each way of training makes of an architecture: `right`, `own rows`, or why not. gap: the largest distance
    of a log-probability from plain transformers' over all that is right; exact: of packed samples with both sides in
    float64."""

    alone: str
    packed: str
    trained: str
    deepspeed: str
    megatron: str
    lora: str
    reward: str
    gap: float = 0.0
    exact: float = 0.0


def judge(kind: str, directory: Path) -> Verdict:
    """Computes a tiny model of this kind in every way, and compares."""
    try:
        state = tiny_state(kind, directory)
    except TrainerError as error:
        return Verdict(*["refused: " + _said(error)] * 7)
    except Exception as error:  # any model's own code
        return Verdict(*["untested: no tiny model, " + _said(error)] * 7)
    gaps: list[float] = []

    def way(compute: Any) -> str:
        try:
            model, gap = compute()
        except TrainerError as error:
            return "refused: " + _said(error)
        except Exception as error:  # any model's own code
            return "BROKEN: " + _said(error)
        if not gap < (TOLERANCE if exact is None or not exact < EXACT else ROUNDING):
            return f"WRONG by {gap:.1e}"
        gaps.append(gap)
        return ROWS if model is not None and rows.has_rows(model) else RIGHT

    def torch_of(batch: MicroBatch) -> Any:
        def compute() -> tuple[Any, float]:
            model, plain = build(state.assets, state.tensors), plain_logprobs(state, batch)
            with torch.no_grad():
                modes = [ForwardPass(model.train(is_on), batch).tokens(1.0)[0] for is_on in (True, False)]
            return model, max(_far(found, plain) for found in modes)

        return compute

    def trained() -> tuple[Any, float]:
        rows = train_and_reload(state, directory / "versions")
        return rows.model, _far(rows.ours, rows.theirs)

    def deepspeed() -> tuple[Any, float]:
        backend = DeepSpeedBackend(device="cpu")
        backend.form(0, 1, None, 60.0)
        try:
            backend.load(state)
            (found,) = backend.score([batch], 1.0)
            return rows.behind(backend._learner("actor").model), _far(found, plain_logprobs(state, batch))
        finally:
            backend.tear_down()

    def lora() -> tuple[Any, float]:
        whole = build(state.assets, state.tensors)
        linear = {
            name.rpartition(".")[2]
            for name, module in whole.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not whole.get_output_embeddings()
            if f"{name}.weight" in state.weights
        }
        begun = prepare(state, Lora(targets=tuple(linear.intersection(TARGETS)) or tuple(sorted(linear)) or TARGETS))
        adapter = begun.adapter
        assert adapter is not None
        torch.manual_seed(1)
        noisy = {n: 0.1 * torch.randn(w.shape) if n.endswith(B) else w for n, w in adapter.weights.items()}
        begun = replace(begun, adapter=replace(adapter, weights=noisy))
        model = build(begun.assets, begun.tensors)
        assert begun.adapter is not None
        attach(model, begun.adapter)
        with torch.no_grad():
            found = ForwardPass(model.eval(), batch).tokens(1.0)[0]
        return model, _far(found, plain_logprobs(merge(begun), batch))

    def reward() -> tuple[Any, float]:
        scalar = with_scalar_head(state)
        torch.manual_seed(1)
        scalar = replace(scalar, weights={**scalar.weights, SCORE: torch.randn(scalar.weights[SCORE].shape)})
        model = build(scalar.assets, scalar.tensors).eval()
        with torch.no_grad():
            found = ForwardPass(model, batch).values()
        return model, _far(found, plain_values(scalar, batch))

    def megatron() -> tuple[Any, float]:
        architecture(state.assets)
        return None, 0.0  # its numbers are compared in tests/conformance

    batch = pack(samples())
    exact = None
    with suppress(Exception):  # what is wrong with a model, the ways of training say
        exact = distance_in_float64(state, batch)
    return Verdict(
        way(torch_of(pack(samples(1)))), way(torch_of(batch)), way(trained), way(deepspeed), way(megatron), way(lora),
        way(reward),
        max(gaps, default=0.0),
        torch.inf if exact is None else exact,
    )  # fmt: skip


class _Float64(TorchFunctionMode):
    """Inside, what asks for float32 gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def distance_in_float64(state: State, batch: MicroBatch) -> float:
    """The largest distance of a log-probability of samples that are computed together from plain transformers' of each
    alone, nothing in it rounded to float32."""
    model, plain = build(state.assets, state.tensors).eval(), plain_model(state)
    if type(model)._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # grouped products know no float64
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), _Float64():
            one, other = ForwardPass(model.double(), batch).tokens(1.0)[0], logprobs_alone(plain.double(), batch)
    finally:
        torch.set_default_dtype(torch.float32)
    assert one.dtype == other.dtype == torch.float64
    return _far(one, other)


@dataclass(frozen=True, slots=True)
class Reload:
    """Log-probabilities of a trained model, in packed rows, and of what transformers loads from its version."""

    model: Any
    ours: torch.Tensor
    theirs: torch.Tensor
    before: torch.Tensor


def train_and_reload(state: State, root: Path) -> Reload:
    """Trains one step, saves, and loads the version by transformers' own means. AssertionError where it is not read
    back bit for bit, a weight did not move, or a constant did."""
    backend = TorchBackend(device="cpu", compute=Compute(logits=3 * VOCABULARY))  # the head in pieces
    backend.form(0, 1, None, 60.0)
    try:
        trainer = Trainer(backend, Sft(), Schedule(1e-3))
        trainer.load(state)
        trainer.train(samples(), minibatches=[[0, 1]], version=0)
        made, batch = backend.gather(), pack(samples())
        assert made is not None
        version = checkpoint.write(root, 1, made).path
        back = checkpoint.read(version)
        assert back.weights.keys() == state.weights.keys()
        assert back.constants.keys() == state.constants.keys()
        assert all(torch.equal(tensor, made.tensors[name]) for name, tensor in back.tensors.items())
        assert not all(torch.equal(tensor, state.weights[name]) for name, tensor in made.weights.items())
        here = tensors_of(backend.model)
        assert all(torch.equal(tensor, here[name]) for name, tensor in state.constants.items())
        with torch.no_grad(), inference_mode([backend.model]):
            ours = ForwardPass(backend.model, batch, logits=3 * VOCABULARY).tokens(1.0)[0]
        loaded = AutoModelForCausalLM.from_pretrained(version, **PLAIN).eval()
        return Reload(backend.model, ours, logprobs_alone(loaded, batch), plain_logprobs(state, batch))
    finally:
        backend.tear_down()


def leak(state: State) -> float:
    """How far the other samples of a row move when the tokens of one change."""
    model = build(state.assets, state.tensors).eval()
    before = pack(samples())
    first = before.members[0]
    changed = replace(first, tokens=np.roll(first.tokens, 1))
    after = pack([changed, *before.members[1:]])
    assert [member.trajectory for member in after.members] == [member.trajectory for member in before.members]
    with torch.no_grad():
        one, two = (ForwardPass(model, batch).tokens(1.0)[0] for batch in (before, after))
    others = torch.from_numpy(
        np.repeat([m is not first for m in before.members], [m.trainable for m in before.members])
    )
    return _far(one[others], two[others])


def _far(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().nan_to_num(nan=torch.inf).max()) if one.shape == other.shape else torch.inf


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())[:220]
    return text if isinstance(error, TrainerError) else f"{type(error).__name__}: {text[:120]}"
