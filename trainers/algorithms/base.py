"""The seam of algorithms.

An algorithm weighs the samples of a batch (whole groups, on the rank that has them), then turns log-probabilities of
packed tokens into one summed loss. It is pure: same samples and log-probabilities, same answer. Invariant: `measures`
names every sum that `loss` returns, on every rank and for empty micro-batches too, so that ranks add them up in one
collective.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from trainers.batches.packing import Packed, Weighted
from trainers.batches.sample import Sample

Sums = Mapping[str, torch.Tensor]


class Algorithm(ABC):
    """`minibatches`: optimizer steps a batch is cut into. `temperature`: what the behaviour policy sampled with; logits
    are divided by it."""

    name: ClassVar[str]
    measures: ClassVar[tuple[str, ...]]
    minibatches: int
    temperature: float

    def needs_proximal(self) -> bool:
        """Whether log-probabilities are recomputed before the first optimizer step of a batch."""
        return False

    @abstractmethod
    def weigh(self, samples: Sequence[Sample], oldest: int | None) -> list[Weighted]:
        """Each sample with its advantage and which of its tokens may pull."""

    @abstractmethod
    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, batch: Packed) -> tuple[torch.Tensor, Sums]:
        """float32[M] log-probabilities (with gradient) and entropies (without) of `batch` -> summed loss and sums to
        report."""
