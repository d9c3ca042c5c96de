"""Policy losses, one value a token.

    u_t = exp(logp_t - old_t)
    L_t = -min(u_t A_t, clip(u_t, 1 - low, 1 + high) A_t)                                  clipped surrogate
    L_t = min(exp(prox_t - behav_t), cap) * clipped surrogate with old = prox              decoupled

`old` is the behaviour policy that sampled the token, or, decoupled, the proximal policy: the weights the step started
from.
"""

from __future__ import annotations

import torch


def clipped_surrogate(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32[M] each -> losses [M] and whether the clip won, bool[M] (a tie is not clipped)."""
    ratio = torch.exp(logprobs - old)
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(free, clipped), free < clipped


def behaviour_weight(proximal: torch.Tensor, behaviour: torch.Tensor, cap: float) -> torch.Tensor:
    """min(prox / behav, cap), float32[M]: what makes a step unbiased for samples of older policies, its variance
    capped."""
    return torch.exp(proximal - behaviour).clamp(max=cap)
