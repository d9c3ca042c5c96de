"""Packs samples into 1-D micro-batches with block-diagonal causal attention, without padding.

A micro-batch is one row of concatenated samples; positions restart at each. Samples of equal length lie side by side as
a `Run`, which attention folds into a dense batch (`attention.py`), so no token attends across samples and no mask
matrix exists. Only positions that predict a trainable token get logits: `at` are those positions, `labels` the tokens
they predict, and every per-token column (behaviour log-probability, version, advantage, keep) is indexed alike. So
nothing is ever rolled.

Invariants: the packed order depends on the samples alone, never on the order they came in; every trainable token of a
sample appears exactly once over the micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from trainers.batches.sample import Sample


@dataclass(frozen=True, slots=True)
class Run:
    """`count` samples of `length` tokens each, from `start` on in the packed row."""

    start: int
    count: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Weighted:
    """A sample as an algorithm sees it: its advantage, and keep uint8[T], 0 where a trainable token must not pull."""

    sample: Sample
    advantage: float
    keep: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """T packed tokens of which M predict a trainable token.

    tokens, positions int64[1, T]; at, labels int64[M]; behaviour, advantages, keep float32[M]; versions int64[M];
    owners int64[M], which sample a token belongs to; proximal float32[M] once recomputed.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    runs: tuple[Run, ...]
    at: torch.Tensor
    labels: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    keep: torch.Tensor
    versions: torch.Tensor
    owners: torch.Tensor
    proximal: torch.Tensor | None = None

    @property
    def trainable(self) -> int:
        """M, counted before `keep`: what denominators use."""
        return int(self.labels.numel())

    @property
    def length(self) -> int:
        """T, without the idle token."""
        return int(self.tokens.numel()) if self.samples else 0

    @property
    def samples(self) -> int:
        """Samples in it."""
        return int(self.owners[-1]) + 1 if self.owners.numel() else 0

    def with_proximal(self, proximal: torch.Tensor) -> Packed:
        """The same micro-batch with the proximal policy's log-probabilities, float32[M]."""
        return replace(self, proximal=proximal)

    def to(self, device: torch.device) -> Packed:
        """The same micro-batch on `device`."""
        tensors = {name: getattr(self, name).to(device) for name in _COLUMNS}
        return replace(self, **tensors, proximal=None if self.proximal is None else self.proximal.to(device))


_COLUMNS = ("tokens", "positions", "at", "labels", "behaviour", "advantages", "keep", "versions", "owners")


def cut(samples: Sequence[Weighted], budget: int) -> list[list[Weighted]]:
    """Micro-batches of at most `budget` tokens (a longer sample goes alone), in canonical order, trainable samples
    only."""
    ordered = sorted((w for w in samples if w.sample.trainable), key=_canonical)
    micros: list[list[Weighted]] = []
    room = 0
    for weighted in ordered:
        length = weighted.sample.length
        if not micros or length > room:
            micros.append([])
            room = budget
        micros[-1].append(weighted)
        room -= length
    return micros


def _canonical(weighted: Weighted) -> tuple[int, int, str, int]:
    sample = weighted.sample
    return sample.length, sample.seq, sample.trajectory, sample.lineage


def pack(samples: Sequence[Weighted]) -> Packed:
    """One micro-batch of `samples`, which may be empty: then one idle token that trains nothing keeps collectives
    aligned."""
    ordered = sorted(samples, key=_canonical)
    if not ordered:
        return _idle()
    lengths = [w.sample.length for w in ordered]
    starts = np.cumsum([0, *lengths])[:-1]
    masks = [np.flatnonzero(w.sample.mask) for w in ordered]
    label_at = np.concatenate([start + mask for start, mask in zip(starts, masks, strict=True)])
    tokens = np.concatenate([w.sample.tokens for w in ordered]).astype(np.int64)

    def column(of: str) -> NDArray[np.float32]:
        return np.concatenate([getattr(w.sample, of)[mask] for w, mask in zip(ordered, masks, strict=True)])

    counts = [len(mask) for mask in masks]
    return Packed(
        tokens=torch.from_numpy(tokens)[None],
        positions=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))[None],
        runs=tuple(_runs(lengths)),
        at=torch.from_numpy(label_at - 1),
        labels=torch.from_numpy(tokens[label_at]),
        behaviour=torch.from_numpy(column("logprobs").astype(np.float32)),
        advantages=torch.from_numpy(np.repeat(np.array([w.advantage for w in ordered], np.float32), counts)),
        keep=torch.from_numpy(
            np.concatenate([w.keep[mask] for w, mask in zip(ordered, masks, strict=True)]).astype(np.float32)
        ),
        versions=torch.from_numpy(column("versions").astype(np.int64)),
        owners=torch.from_numpy(np.repeat(np.arange(len(ordered)), counts)),
    )


def _runs(lengths: Sequence[int]) -> list[Run]:
    runs: list[Run] = []
    start = 0
    for length in lengths:
        if runs and runs[-1].length == length:
            runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
        else:
            runs.append(Run(start, 1, length))
        start += length
    return runs


def _idle() -> Packed:
    zero, none = torch.zeros((1, 1), dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    empty = torch.zeros(0)
    return Packed(zero, zero.clone(), (Run(0, 1, 1),), none, none, empty, empty, empty, none, none)
