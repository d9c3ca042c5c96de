"""From losses of tokens to the loss of a minibatch.

    token       sum over tokens of L_t * keep_t  /  N          N = trainable tokens of the whole minibatch
    sequence    mean over samples of (sum_t L_t keep_t / n)    n = trainable tokens of the sample
    constant    sum over tokens of L_t * keep_t  /  (samples * limit)

Each rank and micro-batch contributes its sum and its count, each over all ranks; gradients are summed; the one division
is the same everywhere. So the result does not depend on how a minibatch is cut. Counts are taken before `keep`: masking
a token (staleness, a missing reward, a rejected ratio) removes its pull and never gives the others more. What an
algorithm does not accept at all (cut-off replies under mask_truncated, groups under dynamic_sampling) is not counted.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

import torch

from millrace.trainers.batches.packing import MicroBatch

Aggregation: TypeAlias = Literal["token", "sequence", "constant"]
AGGREGATIONS = ("token", "sequence", "constant")


class TokenOwners(Protocol):
    """Tokens of samples, one sample after the other: a micro-batch, or a whole batch before it is cut."""

    @property
    def owners(self) -> torch.Tensor:
        """int64[M]: which sample a token belongs to."""

    @property
    def samples(self) -> int:
        """S."""


def token_sum(losses: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """float32[M], float32[M] -> scalar: the sum that every rank adds up. Masked tokens may hold anything, even NaN."""
    return torch.where(keep > 0, losses * keep, 0.0).sum()


def sample_sums(values: torch.Tensor, batch: TokenOwners) -> torch.Tensor:
    """float[M] -> float[S]."""
    return values.new_zeros(batch.samples).index_add(0, batch.owners, values)


def sample_means(values: torch.Tensor, keep: torch.Tensor, batch: TokenOwners) -> torch.Tensor:
    """float[M] -> float[S]: means over the tokens that are kept, 0 for a sample that keeps none."""
    return sample_sums(torch.where(keep > 0, values, 0.0), batch) / sample_sums(keep.to(values), batch).clamp(min=1)


def aggregate(kind: str, losses: torch.Tensor, keep: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """What this micro-batch adds to the numerator."""
    if kind == "sequence":
        sizes = sample_sums(torch.ones_like(keep), batch)
        return token_sum(losses / sizes[batch.owners], keep)
    return token_sum(losses, keep)


def count(kind: str, limit: int, batch: MicroBatch) -> float:
    """What this micro-batch adds to the denominator."""
    match kind:
        case "sequence":
            return float(batch.samples)
        case "constant":
            return float(batch.samples * limit)
        case _:
            return float(batch.trainable)
