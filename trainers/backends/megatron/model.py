"""Megatron's GPT over packed rows: its layers and parallel matrices, with attention that knows where samples end.

    tokens, positions [1, T/c]  ->  the asked rows [m, H], for the head; or a value a token [T/c], of scalar models

Positions restart at each sample, so rotary embeddings come from positions and not from a row's length. Attention takes
the samples' bounds where Megatron passes a mask: runs int64[R, 3] (start, count, length) of the whole row, or, under
context parallelism, bool[T/c, T] of who sees whom, and then gathers keys and values.

Invariant: building a model uses no collective; its weights are filled in afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from millrace.trainers.backends.layout import Layout
from millrace.trainers.backends.megatron.config import Architecture, transformer_config
from millrace.trainers.batches.attention import packed_attention
from millrace.trainers.batches.packing import SampleRun


class SplitNorm(torch.nn.RMSNorm):
    """RMSNorm whose gradient Megatron sums over the ranks that split a sequence."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PackedAttention(torch.nn.Module):
    """Megatron's core attention for packed rows."""

    def __init__(self, config: TransformerConfig, **_: object) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor, **_: object
    ) -> torch.Tensor:
        """query [T/c, 1, H, D], key and value [T/c, 1, KV, D] -> [T/c, 1, H D]."""
        if attention_mask.dtype is torch.bool:
            group = parallel_state.get_context_parallel_group()
            key, value = (
                tensor_parallel.gather_from_sequence_parallel_region(x.contiguous(), group=group) for x in (key, value)
            )
            repeats = query.shape[2] // key.shape[2]
            key, value = (x.repeat_interleave(repeats, 2) for x in (key, value))
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, scale=self.scale)
            return out.permute(2, 0, 1, 3).flatten(2)
        runs = tuple(SampleRun(*bounds) for bounds in attention_mask.tolist())
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        attention, _weights = packed_attention(self, q, k, v, None, scaling=self.scale, runs=runs)
        return attention.transpose(0, 1).flatten(2)


class PackedRotary(torch.nn.Module):
    """Rotary angles of the positions that the next forward pass has."""

    def __init__(self, head: int, theta: float, device: torch.device) -> None:
        super().__init__()
        exponents = torch.arange(0, head, 2, dtype=torch.int64).float() / head
        self.frequencies = (1.0 / theta**exponents).to(device)
        self.positions = torch.zeros(0)

    def get_rotary_seq_len(self, *_: object) -> int:
        """Megatron asks; positions answer."""
        return 0

    def forward(self, *_: object, **__: object) -> torch.Tensor:
        """float32[T/c, 1, 1, head]."""
        angles = torch.outer(self.positions.float(), self.frequencies)
        return torch.cat((angles, angles), -1)[:, None, None]


class ScalarHead(torch.nn.Module):
    """A value a token. Every tensor-parallel rank holds the whole of it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden))

    def forward(self, hidden: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        """[T, 1, H] -> [T, 1, 1]."""
        return F.linear(hidden, self.weight), None


class PackedGPT(GPTModel):  # type: ignore[misc]  # Megatron has no types
    """This rank's part of a decoder. `rows`: which rows of its tokens the next forward pass leaves for the head."""

    def __init__(self, arch: Architecture, layout: Layout, device: torch.device) -> None:
        config = transformer_config(arch, layout)
        self.arch = arch
        super().__init__(
            config,
            _block(arch, config),
            vocab_size=arch.padded_size(layout),
            max_sequence_length=arch.longest,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            parallel_output=True,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="rope",
            rotary_base=arch.theta,
        )
        self.rotary_pos_emb = PackedRotary(arch.head, arch.theta, device)
        self.rows = torch.zeros(0, dtype=torch.int64)
        _mark_split(self)
        if self.post_process:
            if arch.scalar:
                self.output_layer = ScalarHead(arch.hidden)
            else:
                # The rows are picked from the whole sequence, so it is gathered before the head and not in it.
                head: Any = self.output_layer
                head.sequence_parallel, head.allreduce_dgrad = False, layout.t > 1

    def setup_embeddings_and_output_layer(self) -> None:
        """Marks the weights that first and last stage share; Megatron would also copy them, by a collective."""
        if self.share_embeddings_and_output_weights and self.config.pipeline_model_parallel_size > 1:
            weight: Any = self.shared_embedding_or_output_weight()
            if weight is not None:
                weight.shared_embedding = True
                weight.shared = not self.pre_process

    def prepare(self, positions: torch.Tensor, rows: torch.Tensor) -> None:
        """Before each forward pass: positions int64[T/c] of its tokens; rows int64[m] that are left."""
        self.rotary_pos_emb.positions = positions
        self.rows = rows

    def _postprocess(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        """Hidden states [T/c/t, 1, H] for the next stage; of the last one, the asked rows [m, H] or values [T/c]."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        if self.arch.scalar:
            values: torch.Tensor = self.output_layer(hidden_states)[0][:, 0, 0]
            return values
        return hidden_states[:, 0].index_select(0, self.rows)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V], on the last stage."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _bias = self.output_layer(rows[:, None], weight=weight)
        full_logits: torch.Tensor = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
        return full_logits[:, 0, : self.arch.vocabulary]


def _mark_split(model: torch.nn.Module) -> None:
    """Marks the parameters that tensor parallelism splits, so that a norm counts every element once. Megatron does it
    while it initialises weights, which ours need not be."""
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)):
            across = int(isinstance(module, RowParallelLinear))
            for parameter in module.parameters(recurse=False):
                if not hasattr(parameter, "tensor_model_parallel"):
                    tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, across, 1)


def _block(arch: Architecture, config: TransformerConfig) -> TransformerBlockSubmodules:
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=SplitNorm if arch.qk_norm else IdentityOp,
            k_layernorm=SplitNorm if arch.qk_norm else IdentityOp,
        ),
    )
    if arch.experts:
        mlp = get_moe_module_spec_for_backend(backend=LocalSpecProvider(), num_experts=arch.experts)
    else:
        mlp = ModuleSpec(
            module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=SplitNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=SplitNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=SplitNorm)
