"""What a Hugging Face configuration means to Megatron-core: Qwen2, Qwen3 and Qwen3-MoE.

    HF                                     Megatron
    attention bias (Qwen2)                 add_qkv_bias
    q_norm, k_norm (Qwen3)                 qk_layernorm
    norm_topk_prob                         softmax over the chosen experts alone (else before the choice)

Invariant: what this backend would compute otherwise than transformers does is refused, never approximated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from transformers import AutoConfig

from millrace.trainers.backends.layout import Layout
from millrace.trainers.errors import BadConfiguration, CheckpointError
from millrace.trainers.weights.model_class import is_scalar

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

INSTEAD = "use a torch: layout for it"


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder as both sides see it. groups: key-value heads; ffn: of the dense layer, or of one expert; experts: 0
    where layers are dense; scalar: a value head instead of a vocabulary."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head: int
    ffn: int
    vocabulary: int
    longest: int
    eps: float
    theta: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    experts: int = 0
    experts_per_token: int = 0
    is_renormalising: bool = True
    scalar: bool = False

    def padded_size(self, layout: Layout) -> int:
        """Rows of the vocabulary as tensor parallelism needs them: a multiple of t; the last ones are never used."""
        return -(-self.vocabulary // layout.t) * layout.t


def expert_tensor(layout: Layout) -> int:
    """Ranks that one expert is cut over: as the layout says, and as any other matrix where experts are not spread."""
    return layout.etp if layout.e > 1 else layout.t


def architecture(assets: Mapping[str, bytes]) -> Architecture:
    """Of the config.json among `assets`. BadConfiguration for what Megatron's part of Millrace cannot compute."""
    if "config.json" not in assets:
        raise CheckpointError("no config.json in the state; start from a directory in Hugging Face layout")
    settings: dict[str, Any] = json.loads(assets["config.json"])
    kind = settings.pop("model_type")
    if kind not in ("qwen2", "qwen3", "qwen3_moe"):
        raise BadConfiguration(f"megatron trains qwen2, qwen3 and qwen3_moe, not {kind}; {INSTEAD}")
    config = AutoConfig.for_model(kind, **settings)
    rope = dict(config.rope_parameters or {})
    for trait, present in {
        f"rope of type {rope.get('rope_type')}": rope.get("rope_type", "default") != "default",
        "partial rotary embeddings": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "sliding windows": bool(getattr(config, "use_sliding_window", False)),
        f"activation {config.hidden_act}": config.hidden_act != "silu",
        "attention biases beside Qwen2": kind != "qwen2" and bool(getattr(config, "attention_bias", False)),
        "dense layers between expert layers": kind == "qwen3_moe"
        and (bool(config.mlp_only_layers) or config.decoder_sparse_step != 1),
    }.items():
        if present:
            raise BadConfiguration(f"megatron has no {trait} here; {INSTEAD}")
    sparse = kind == "qwen3_moe"
    scalar = is_scalar(settings)
    return Architecture(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        head=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        ffn=config.moe_intermediate_size if sparse else config.intermediate_size,
        vocabulary=config.vocab_size,
        longest=config.max_position_embeddings,
        eps=config.rms_norm_eps,
        theta=float(rope.get("rope_theta", 10000.0)),
        tied=bool(config.tie_word_embeddings) and not scalar,
        qkv_bias=kind == "qwen2",
        qk_norm=kind != "qwen2",
        experts=config.num_experts if sparse else 0,
        experts_per_token=config.num_experts_per_tok if sparse else 0,
        is_renormalising=bool(config.norm_topk_prob) if sparse else True,
        scalar=scalar,
    )


def check(arch: Architecture, layout: Layout) -> None:
    """BadConfiguration where the model does not divide as `layout` asks."""
    for part, size, by, name in (
        ("key-value heads", arch.groups, layout.t, "t"),
        ("attention heads", arch.heads, layout.t, "t"),
        ("feed-forward units", arch.ffn, layout.t if not arch.experts else expert_tensor(layout), "t"),
        ("layers", arch.layers, layout.p, "p"),
        ("experts", arch.experts or layout.e, layout.e, "e"),
    ):
        if size % by:
            raise BadConfiguration(f"{size} {part} do not divide by {name} = {by}; choose a divisor")
    if layout.e > 1 and not arch.experts:
        raise BadConfiguration(f"e = {layout.e} needs a model with experts; this one has dense layers")


def transformer_config(arch: Architecture, layout: Layout) -> TransformerConfig:
    """Megatron's own configuration, every fusion off: they need Transformer Engine or Apex and change roundings."""
    import torch
    from megatron.core.transformer import TransformerConfig

    fusions = (
        "bias_activation_fusion",
        "masked_softmax_fusion",
        "persist_layer_norm",
        "gradient_accumulation_fusion",
        "apply_rope_fusion",
        "bias_dropout_fusion",
    )
    sparse: dict[str, Any] = {}
    if arch.experts:
        sparse = {
            "num_moe_experts": arch.experts,
            "moe_ffn_hidden_size": arch.ffn,
            "moe_router_topk": arch.experts_per_token,
            "moe_router_pre_softmax": not arch.is_renormalising,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "expert_model_parallel_size": layout.e,
            "expert_tensor_parallel_size": expert_tensor(layout),
        }
    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        num_attention_heads=arch.heads,
        num_query_groups=arch.groups,
        kv_channels=arch.head,
        ffn_hidden_size=arch.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=arch.eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=layout.p > 1,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=False,
        tensor_model_parallel_size=layout.t,
        pipeline_model_parallel_size=layout.p,
        context_parallel_size=layout.c,
        sequence_parallel=layout.t > 1,
        **sparse,
        **dict.fromkeys(fusions, False),
    )
