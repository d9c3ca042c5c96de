"""From losses of tokens to the loss of a minibatch.

    loss = sum over tokens of L_t * keep_t  /  N        N = trainable tokens of the whole minibatch, over all ranks

Each rank and micro-batch contributes its sum; gradients are summed; the one division by N is the same everywhere. So
the result does not depend on how a minibatch is cut. N counts tokens before `keep`: masking a token (staleness, a
missing reward) removes its pull and never gives the others more.
"""

from __future__ import annotations

import torch


def token_sum(losses: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """float32[M], float32[M] -> scalar: the sum that every rank adds up. Masked tokens may hold anything, even NaN."""
    return torch.where(keep > 0, losses * keep, 0.0).sum()
