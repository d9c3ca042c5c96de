"""Block-diagonal causal attention for packed rows, registered with transformers as `millrace_packed`.

Samples of equal length (a `Run`) become one dense batch for PyTorch's scaled dot-product attention: no padding, no T x
T mask, and each sample's arithmetic is that of the unpacked model. Without `runs` (generation with a cache) it is
transformers' own sdpa.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trainers.batches.packing import Run

NAME = "millrace_packed"


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    runs: tuple[Run, ...] | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, KV, T, D] -> [1, T, H, D]. Tokens see their own sample's past alone."""
    if runs is None:
        out: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **rest
        )
        return out
    repeats = query.shape[1] // key.shape[1]
    heads = [query, key, value] if repeats == 1 else [query, *(x.repeat_interleave(repeats, 1) for x in (key, value))]
    rows = [x[0].transpose(0, 1) for x in heads]  # [T, H, D]
    blocks = []
    for run in runs:
        q, k, v = (
            x[run.start : run.start + run.count * run.length].view(run.count, run.length, *x.shape[1:]).transpose(1, 2)
            for x in rows
        )
        window = None
        if sliding_window is not None and run.length > sliding_window:
            steps = torch.arange(run.length, device=q.device)
            gap = steps[:, None] - steps[None]
            window = (gap >= 0) & (gap < sliding_window)
        block = F.scaled_dot_product_attention(
            q, k, v, attn_mask=window, dropout_p=dropout, is_causal=window is None, scale=scaling
        )
        blocks.append(block.transpose(1, 2).flatten(0, 1))
    return torch.cat(blocks)[None], None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
