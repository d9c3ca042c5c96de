"""Rows being sampled together by a transformers model: prefill, one token a step, rows in and out at any step.

Invariants: rows are padded on the left, so the newest token of each is in the last column; every cached key was
computed by the weights that are loaded now (`recompute` after a swap), so log-probabilities equal a plain forward's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from millrace.infra.engines.base import Sampling


@dataclass(eq=False, slots=True)
class BatchRow:
    """One choice of one request while it is sampled. `ticket` is whatever its owner wants back."""

    prompt: list[int]
    sampling: Sampling
    limit: int
    ticket: Any
    index: int
    generator: torch.Generator | None
    output: list[int] = field(default_factory=list)
    labels: list[tuple[str, int]] = field(default_factory=list)


class RunningRows:
    """The rows in flight. `logits` [rows, vocabulary] are those of each row's next token, of the loaded weights."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.rows: list[BatchRow] = []
        self._clear()

    def _clear(self) -> None:
        self._cache: Any = DynamicCache()
        self._mask = torch.zeros(0, 0, dtype=torch.long)
        self.logits = torch.zeros(0, 0)

    @torch.inference_mode()
    def admit(self, rows: Sequence[BatchRow]) -> None:
        """Prefill new rows and join them to those in flight. Rows that share a prompt object are prefilled once."""
        prompts: dict[int, int] = {}
        sequences: list[list[int]] = []
        source: list[int] = []
        for row in rows:
            if row.output or id(row.prompt) not in prompts:
                sequences.append(row.prompt + row.output)
                position = len(sequences) - 1
                if not row.output:
                    prompts[id(row.prompt)] = position
            else:
                position = prompts[id(row.prompt)]
            source.append(position)
        width = max(len(sequence) for sequence in sequences)
        ids = torch.tensor([[0] * (width - len(sequence)) + sequence for sequence in sequences])
        mask = torch.tensor([[0] * (width - len(sequence)) + [1] * len(sequence) for sequence in sequences])
        cache = DynamicCache()
        logits = self._forward(ids, mask, cache)
        if len(source) != len(sequences):
            pick = torch.tensor(source)
            logits, mask = logits[pick], mask[pick]
            _select(cache, pick)
        if self.rows:
            mask = _join(self._cache, self._mask, cache, mask)
            logits = torch.cat([self.logits, logits])
        else:
            self._cache = cache
        self._mask, self.logits = mask, logits
        self.rows.extend(rows)

    @torch.inference_mode()
    def advance(self, tokens: Tensor) -> None:
        """Feed the token [rows] that was drawn for each row."""
        self._mask = torch.cat([self._mask, torch.ones(len(self.rows), 1, dtype=torch.long)], 1)
        self.logits = self._forward(tokens[:, None], self._mask, self._cache)

    @torch.inference_mode()
    def keep(self, positions: Sequence[int]) -> None:
        """Drop every row but these."""
        if len(positions) == len(self.rows):
            return
        self.rows = [self.rows[position] for position in positions]
        if not self.rows:
            self._clear()
            return
        pick = torch.tensor(positions)
        _select(self._cache, pick)
        self._mask, self.logits = self._mask[pick], self.logits[pick]
        blank = int(self._mask.argmax(1).min())  # columns in which nobody has a token any more
        if blank:
            self._mask = self._mask[:, blank:]
            for layer in self._cache.layers:
                layer.keys, layer.values = layer.keys[:, :, blank:], layer.values[:, :, blank:]

    def recompute(self) -> None:
        """Compute all keys, values and next-token logits again: the weights have changed."""
        rows, self.rows = self.rows, []
        self._clear()
        if rows:
            self.admit(rows)

    def _forward(self, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1].float()
        return logits


def _select(cache: Any, pick: Tensor) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[pick], layer.values[pick]


def _join(cache: Any, mask: Tensor, joiner: Any, other_mask: Tensor) -> Tensor:
    """Append the rows of `joiner` to `cache`, padding the narrower on the left; returns the joint mask."""
    width = max(mask.shape[1], other_mask.shape[1])

    def widen(tensor: Tensor, dim: int) -> Tensor:
        missing = width - tensor.shape[dim]
        if not missing:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = missing
        return torch.cat([tensor.new_zeros(shape), tensor], dim)

    for layer, joiner_layer in zip(cache.layers, joiner.layers, strict=True):
        layer.keys = torch.cat([widen(layer.keys, 2), widen(joiner_layer.keys, 2)])
        layer.values = torch.cat([widen(layer.values, 2), widen(joiner_layer.values, 2)])
    return torch.cat([widen(mask, 1), widen(other_mask, 1)])


@torch.inference_mode()
def draw(logits: Tensor, rows: Sequence[BatchRow], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample a token for each row: (tokens [rows] int64, raw log-softmax [rows, vocabulary] float32).

    A seeded row draws from its own generator, so its tokens do not depend on who shares the batch."""
    raw = logits.log_softmax(-1)
    temperature = torch.tensor([row.sampling.temperature for row in rows])
    greedy = temperature == 0
    if any(row.sampling.is_biased for row in rows):
        logits = torch.stack([bias_logits(scores, row) for scores, row in zip(logits, rows, strict=True)])
    best = logits.argmax(-1)
    if bool(greedy.all()):
        return best, raw
    scores = logits / torch.where(greedy, 1.0, temperature)[:, None]
    for position, row in enumerate(rows):
        if row.sampling.min_p:
            weak = scores[position].softmax(-1) < row.sampling.min_p * scores[position].softmax(-1).max()
            scores[position, weak] = float("-inf")
        if row.sampling.top_k or row.sampling.top_p < 1:
            scores[position] = truncate(scores[position], row.sampling.top_k, row.sampling.top_p)
    # argmax of p / Exp(1) is a draw from p
    noise = torch.empty_like(scores).exponential_(generator=generator)
    for position, row in enumerate(rows):
        if row.generator is not None:
            noise[position].exponential_(generator=row.generator)
    sample = (scores.softmax(-1) / noise).argmax(-1)
    return torch.where(greedy, best, sample), raw


def bias_logits(logits: Tensor, row: BatchRow) -> Tensor:
    """`logits` [vocabulary] with a row's bias and penalties, as vLLM applies them."""
    sampling, out = row.sampling, logits.clone()
    for token, bias in sampling.logit_bias:
        out[token] += bias
    context = torch.tensor(sorted({*row.prompt, *row.output}))
    factor = sampling.repetition_penalty
    out[context] = torch.where(out[context] > 0, out[context] / factor, out[context] * factor)
    counts = torch.bincount(torch.tensor(row.output, dtype=torch.long), minlength=len(out))
    return out - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)


def truncate(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """`scores` [vocabulary] with -inf outside the `top_k` best (0: all) and the smallest set of mass `top_p`."""
    ranking, places = scores.sort(descending=True)
    if 0 < top_k < len(ranking):
        ranking[top_k:] = float("-inf")
    if top_p < 1:
        mass = ranking.softmax(-1)
        ranking[(mass.cumsum(-1) - mass) >= top_p] = float("-inf")
    return torch.empty_like(scores).scatter_(0, places, ranking)
