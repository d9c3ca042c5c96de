"""Block-diagonal causal attention for packed rows, registered with transformers as `millrace_packed`.

On a GPU a layer's attention is one call of a kernel for stretches of unlike lengths, where one computes what the layer
asks (`kernels.py`). Elsewhere samples of equal length (a `SampleRun`) become one dense batch for PyTorch's scaled dot-
product attention: no padding, no T x T mask, and each sample's arithmetic is that of the unpacked model. What samples
add to a shared beginning attends to keys that are gathered along its path. Without `runs` (generation with a cache) the
mask is the one that transformers makes for its own sdpa.

    scores = cap * tanh(q k^T * scaling / cap)        where the layer caps them
    weights = softmax([scores, sink])[..., :-1]       where a head has a sink: weight that falls on no token

Invariant: what a layer asks of its attention is computed or refused by name. No argument and no mask is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from millrace.trainers.batches.kernels import Request, Stretches, kernel_for, stretches
from millrace.trainers.batches.packing import SampleRun
from millrace.trainers.errors import BadConfiguration

NAME = "millrace_packed"

HARMLESS = (
    "cache_position",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_ids",
    "return_dict",
    "use_cache",
)
"""Arguments that layers pass on and that change nothing in attention over a whole row."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    runs: tuple[SampleRun, ...] | None = None,
    paths: torch.Tensor | None = None,
    where: Stretches | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **rest: object,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, KV, T, D] -> [1, T, H, D]. Tokens see their own sample's past alone.
    paths: see `MicroBatch`. where: of `runs` and `paths`, made here where it is None. softcap: bound of the scores.
    s_aux [H]: a sink for each head. BadConfiguration for what a layer asks beyond that."""
    _refuse_more(module, rest)
    for calls in _counters:
        calls.append(type(module).__name__)
    if runs is None:
        return _attend_rows(module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux, is_causal)
    _refuse_masks(module, attention_mask, is_causal)
    repeats = query.shape[1] // key.shape[1]
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]  # [T, H or KV, D]
    request = Request(
        query.device,
        query.dtype,
        query.shape[-1],
        value.shape[-1],
        sliding_window,
        softcap,
        s_aux is not None,
        dropout,
    )
    kernel = kernel_for(request)
    _ways.setdefault(module, set()).add("runs" if kernel is None else kernel.name)
    if kernel is not None:
        where = where or stretches(runs, paths, query.device)
        keys = [x if where.places is None else x.index_select(0, where.places) for x in rows[1:]]
        return kernel.attend(rows[0], keys[0], keys[1], where, scaling, sliding_window, softcap)[None], None
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
        block = _attend(q, k, v, mask, scaling, dropout, softcap, s_aux)
        blocks.append(block.transpose(1, 2).flatten(0, 1))
    return torch.cat(blocks)[None], None


_ways: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()


def ways_of(model: torch.nn.Module) -> set[str]:
    """How the layers of a model have attended so far: by which kernels, or by runs."""
    return {way for module in model.modules() for way in _ways.get(module, ())}


_counters: list[list[str]] = []


@contextmanager
def count_calls() -> Iterator[list[str]]:
    """The kinds of layers that asked this attention inside."""
    calls: list[str] = []
    _counters.append(calls)
    try:
        yield calls
    finally:
        _counters.remove(calls)


def _refuse_more(module: torch.nn.Module, rest: Mapping[str, object]) -> None:
    """BadConfiguration for arguments that would be left out."""
    names = sorted(name for name, value in rest.items() if value is not None and name not in HARMLESS)
    if names:
        raise BadConfiguration(f"{type(module).__name__} gives its attention {', '.join(names)}")


def _refuse_masks(module: torch.nn.Module, attention_mask: torch.Tensor | None, is_causal: bool | None) -> None:
    """BadConfiguration for masks that would be left out."""
    if attention_mask is not None and attention_mask.numel() > 1:
        raise BadConfiguration(f"{type(module).__name__} makes an attention mask of its own")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise BadConfiguration(f"{type(module).__name__} attends to later tokens")


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[B, H, L, D] of queries, of heads as many keys and values. mask: bool, or None where it is plainly causal."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling
        )
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    scores = scores.float().masked_fill(~mask, torch.finfo(torch.float32).min)
    if sinks is not None:
        column = sinks.float().reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]].to(v.dtype)
    return F.dropout(weights, dropout) @ v


def _attend_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    is_causal: bool | None,
) -> tuple[torch.Tensor, None]:
    """[B, H, L, D] -> [B, L, H, D], with the mask that transformers made for its own sdpa."""
    if softcap is None and sinks is None:
        out: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal
        )
        return out
    repeats = query.shape[1] // key.shape[1]
    k, v = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    block = _attend(query, k, v, attention_mask, scaling, dropout, softcap, sinks)
    return block.transpose(1, 2).contiguous(), None


def _stretches(rows: torch.Tensor, start: int, count: int, length: int) -> torch.Tensor:
    """[T, H, D] -> [count, H, length, D]."""
    return rows[start : start + count * length].view(count, length, *rows.shape[1:]).transpose(1, 2)


def _mask(run: SampleRun, window: int | None, device: torch.device) -> torch.Tensor | None:
    """bool[length, prefix + length], or None where it is plainly causal."""
    width = run.prefix + run.length
    narrow = window is not None and width > window
    if not run.prefix and not narrow:
        return None
    gap = torch.arange(run.prefix, width, device=device)[:, None] - torch.arange(width, device=device)[None]
    mask = gap >= 0
    return mask & (gap < window) if narrow and window is not None else mask


def register(name: str, attention: Callable[..., tuple[torch.Tensor, None]]) -> None:
    """Makes models attend by `attention` under this name, with the masks that transformers makes for sdpa. What
    compiles layers leaves it as it is, since runs are of one micro-batch and layers would be compiled for each."""
    AttentionInterface.register(name, torch.compiler.disable(attention))
    AttentionMaskInterface.register(name, sdpa_mask)


register(NAME, packed_attention)
