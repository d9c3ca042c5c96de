"""Samples in rows of their own: how a micro-batch is computed by a model whose layers would mix the samples of a packed
row.

Linear attention, convolutions and recurrent layers carry a state along the row, whatever the attention does. Such a
model gets its samples as a dense batch, one sample a row, filled up at the end; its attention, masks and states are
those of transformers. What its head is given is then put in the order of the packed row:

    tokens [1, T] -> [S, L] -> hidden [S, L, H] -> the rows of `places`, [1, M, H] -> head

Invariant: one forward pass a micro-batch, as with packed rows, so ranks run the same number of collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from millrace.trainers.batches.attention import NAME as PACKED
from millrace.trainers.batches.attention import packed_attention, register
from millrace.trainers.batches.packing import MicroBatch
from millrace.trainers.errors import BadConfiguration
from millrace.trainers.private_apis.transformers import attention_of

NAME = "millrace_rows"
"""attention of rows of their own: as packed attention, with the masks that transformers makes"""
EAGER = "eager"
"""transformers' own, written out by each model: what asks more of its attention than `packed_attention` knows"""


def behind(model: torch.nn.Module) -> torch.nn.Module:
    """The transformers model that a wrapper calls, or `model` itself."""
    inner: torch.nn.Module = getattr(model, "behind", model)
    return inner


def has_rows(model: torch.nn.Module) -> bool:
    """Whether a model computes samples in rows of their own: its attention is not a packed one."""
    config = getattr(behind(model), "config", None)
    return config is not None and not attention_of(config).startswith(PACKED)


def head_of(model: torch.nn.Module) -> torch.nn.Module:
    """What makes logits of hidden states, or scores."""
    inner = behind(model)
    score = getattr(inner, "score", None)
    if isinstance(score, torch.nn.Module):
        return score
    head = inner.get_output_embeddings() if isinstance(inner, PreTrainedModel) else None
    if not isinstance(head, torch.nn.Module):
        raise BadConfiguration(f"{type(inner).__name__} has no head that could be found")
    return head


def run_rows(model: torch.nn.Module, batch: MicroBatch, keep: torch.Tensor | None) -> torch.Tensor:
    """Logits [1, M, V] at the places `keep` int64[M] of the packed row (None: everywhere, [1, T, V])."""
    if batch.paths is not None:
        raise BadConfiguration(
            f"{type(behind(model)).__name__} computes each sample in a row of its own and shares no beginnings: leave "
            "prefix_sharing out"
        )
    tokens, mask, places = _dense(batch)
    rows = places if keep is None else places[keep]
    with _at_places(head_of(model), rows):
        logits: torch.Tensor = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    return logits


def _dense(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens and mask int64[S, L]; places int64[T], where each token of the packed row is in the flat batch."""
    device = batch.tokens.device
    lengths = torch.tensor([run.length for run in batch.runs for _ in range(run.count)], device=device)
    longest = int(lengths.max())
    mask = torch.arange(longest, device=device)[None] < lengths[:, None]
    places = torch.nonzero(mask.flatten())[:, 0]
    tokens = batch.tokens.new_zeros(mask.numel()).index_copy(0, places, batch.tokens[0])
    return tokens.view_as(mask), mask.to(torch.int64), places


@contextmanager
def _at_places(head: torch.nn.Module, places: torch.Tensor) -> Iterator[None]:
    """Inside, a head gets the rows `places` of the flat batch alone, as [1, M, H]."""

    def before(_module: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (arguments[0].flatten(0, 1)[places][None], *arguments[1:])

    handle = head.register_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


register(NAME, packed_attention)
