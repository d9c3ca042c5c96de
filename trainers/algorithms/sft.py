"""Supervised fine-tuning.

    loss = - sum_t logp_t keep_t / N

The trainable tokens are those with mask 1 (the answer); rewards and behaviour log-probabilities are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from trainers.algorithms.aggregation import token_sum
from trainers.algorithms.base import Algorithm, Sums
from trainers.algorithms.masks import fresh
from trainers.batches.packing import Packed, Weighted
from trainers.batches.sample import Sample


@dataclass(frozen=True)
class Sft(Algorithm):
    """Learns to say what the samples say."""

    name: ClassVar[str] = "sft"
    measures: ClassVar[tuple[str, ...]] = ("kept", "entropy")

    minibatches: int = 1
    temperature: float = 1.0

    def weigh(self, samples: Sequence[Sample], oldest: int | None) -> list[Weighted]:
        return [Weighted(sample, 1.0, fresh(sample, oldest)) for sample in samples]

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, batch: Packed) -> tuple[torch.Tensor, Sums]:
        sums = {"kept": batch.keep.sum(), "entropy": token_sum(entropy, batch.keep)}
        return token_sum(-logprobs, batch.keep), sums
