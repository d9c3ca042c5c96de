"""Block-diagonal causal attention for packed rows, registered with transformers as `millrace_packed`.

Samples of equal length (a `Run`) become one dense batch for PyTorch's scaled dot-product attention: no padding, no T x
T mask, and each sample's arithmetic is that of the unpacked model. What samples add to a shared beginning attends to
keys that are gathered along its path. Without `runs` (generation with a cache) it is transformers' own sdpa.
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
    paths: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, KV, T, D] -> [1, T, H, D]. Tokens see their own sample's past alone.
    paths: see `Packed`."""
    if runs is None:
        out: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **rest
        )
        return out
    repeats = query.shape[1] // key.shape[1]
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]  # [T, H or KV, D]
    elsewhere = [] if paths is None else [x.index_select(0, paths) for x in rows[1:]]
    blocks = []
    at = 0
    for run in runs:
        heads = [_stretches(rows[0], run.start, run.count, run.length)]
        if run.prefix:
            width = run.prefix + run.length
            heads += [_stretches(x, at, run.count, width) for x in elsewhere]
            at += run.count * width
        else:
            heads += [_stretches(x, run.start, run.count, run.length) for x in rows[1:]]
        q, k, v = (x if x.shape[1] == query.shape[1] else x.repeat_interleave(repeats, 1) for x in heads)
        mask = _mask(run, sliding_window, q.device)
        block = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling
        )
        blocks.append(block.transpose(1, 2).flatten(0, 1))
    return torch.cat(blocks)[None], None


def _stretches(rows: torch.Tensor, start: int, count: int, length: int) -> torch.Tensor:
    """[T, H, D] -> [count, H, length, D]."""
    return rows[start : start + count * length].view(count, length, *rows.shape[1:]).transpose(1, 2)


def _mask(run: Run, window: int | None, device: torch.device) -> torch.Tensor | None:
    """bool[length, prefix + length], or None where it is plainly causal."""
    width = run.prefix + run.length
    narrow = window is not None and width > window
    if not run.prefix and not narrow:
        return None
    gap = torch.arange(run.prefix, width, device=device)[:, None] - torch.arange(width, device=device)[None]
    mask = gap >= 0
    return mask & (gap < window) if narrow and window is not None else mask


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
