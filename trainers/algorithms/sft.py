"""Supervised fine-tuning.

    loss = - sum_t logp_t keep_t / N

The trainable tokens are those with mask 1 (the answer); rewards and behaviour log-probabilities are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from millrace.trainers.algorithms.aggregation import token_sum
from millrace.trainers.algorithms.base import Scores, Sums, TokenAlgorithm, Weights
from millrace.trainers.algorithms.masks import fresh
from millrace.trainers.algorithms.normalisation import Reduce, alone
from millrace.trainers.batches.packing import KEEP, MicroBatch
from millrace.trainers.batches.sample import Sample


@dataclass(frozen=True)
class Sft(TokenAlgorithm):
    """Learns to say what the samples say."""

    name = "sft"
    measures = ("kept", "entropy")

    minibatches: int = 1  # optimizer steps that a batch is cut into

    def weigh(
        self, samples: Sequence[Sample], oldest: int | None, scores: Scores | None = None, reduce: Reduce = alone
    ) -> Weights:
        return {sample: {KEEP: fresh(sample, oldest).astype(np.float32)} for sample in samples}

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        sums = {"kept": batch.keep.sum(), "entropy": token_sum(entropy, batch.keep)}
        return token_sum(-logprobs, batch.keep), sums
