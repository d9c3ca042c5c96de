"""Estimators of KL(p || q) from tokens that p sampled, d = log p - log q.

    k1 = d                    unbiased, may be negative
    k2 = d^2 / 2              biased, never negative
    k3 = exp(-d) - 1 + d      unbiased, never negative

J. Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html.

In rewards the value of a token is clamped to [-10, 10]; off-policy repair takes it as it is.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

Estimator: TypeAlias = Literal["k1", "k2", "k3"]
ESTIMATORS: tuple[str, ...] = ("k1", "k2", "k3")
CLAMP = 10.0
TINY = 1e-8


def estimate(kind: str, logp: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """float[M] of p and of q at the sampled tokens -> float[M]."""
    d = logp - base
    match kind:
        case "k1":
            return d
        case "k2":
            return d * d / 2
        case _:
            return torch.exp(-d) - 1 + d


def bernoulli(logp: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """max(KL(P, Q), KL(Q, P)) of the Bernoulli variables "this token or another", probabilities clamped to [1e-8, 1 -
    1e-8], in float64 (1 - 1e-8 is 1 in float32)."""
    p, q = (torch.exp(x.double()).clamp(TINY, 1 - TINY) for x in (logp, base))
    forward = p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))
    reverse = q * torch.log(q / p) + (1 - q) * torch.log((1 - q) / (1 - p))
    return torch.maximum(forward, reverse).to(logp.dtype)
