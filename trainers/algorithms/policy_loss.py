"""Policy losses, one value a token.

    u_t = exp(logp_t - old_t)                                         token level
    u_i = exp(mean over sample i of (logp_t - old_t)), A_i = mean A   sequence level: GSPO

    clip    L_t = -min(u A, clip(u, 1 - low, 1 + high) A)             PPO; high > low: clip-higher, as in DAPO
            A < 0 and dual clip c: L_t = min(L_t, -c A)               bounds what a ratio far above 1 can do
    sapo    L_t = -(4 / tau) sigmoid(tau (u - 1)) A                   tau by the sign of A
    cispo   L_t = -stopgrad(clip(u, 1 - low, 1 + high)) A logp_t      no token's gradient is dropped
    gmpo    d_t = clip(logp_t - old_t, -low, high), and logp_t - old_t where that is less (A > 0) or more (A < 0)
            L_t = -exp(mean over sample i of d_t) A_i                 a geometric mean of ratios, each of them clipped

An entropy bonus c takes c H_t off each, H_t the entropy of the policy at token t.

PPO https://arxiv.org/abs/1707.06347, dual clip https://arxiv.org/abs/1912.09729, clip-higher of DAPO https://arxiv.org/abs/2503.14476,
GSPO https://arxiv.org/abs/2507.18071, SAPO https://arxiv.org/abs/2511.20347, CISPO https://arxiv.org/abs/2506.13585,
GMPO https://arxiv.org/abs/2507.20673 (there low = high = 0.4), entropy bonus PPO's equation 9.

`old` is the policy that sampled the token, or the one that the batch started from (`proximal.py`).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from millrace.trainers.algorithms.aggregation import sample_means
from millrace.trainers.batches.packing import MicroBatch

Objective: TypeAlias = Literal["clip", "sapo", "cispo", "gmpo"]
OBJECTIVES = ("clip", "sapo", "cispo", "gmpo")


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """float[M] each -> losses [M] and whether the clip won, bool[M] (a tie is not clipped)."""
    raw = -advantages * ratio
    clip_loss = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    losses = torch.maximum(raw, clip_loss)
    if dual is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual * advantages), losses)
    return losses, raw < clip_loss


def sapo(ratio: torch.Tensor, advantages: torch.Tensor, tau_pos: float, tau_neg: float) -> torch.Tensor:
    """A gate instead of a clip: its slope is 1 where the ratio is 1, and falls smoothly to both sides."""
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(ratio)
    return -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantages


def cispo(
    logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """REINFORCE with a bounded importance weight."""
    return -ratio.detach().clamp(1.0 - low, 1.0 + high) * advantages * logprobs


def gmpo(
    log_ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, keep: torch.Tensor, batch: MicroBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """float[M] each, advantages the same at each token of a sample -> losses [M], a sample's at each of its tokens, and
    whether the clip won, bool[M]."""
    near = log_ratio.clamp(-low, high)
    bounded = torch.where(advantages > 0, torch.minimum(log_ratio, near), torch.maximum(log_ratio, near))
    return -sequence_ratio(bounded, keep, batch) * advantages, bounded != log_ratio


def sequence_ratio(log_ratio: torch.Tensor, keep: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """The geometric mean of a sample's ratios at each of its tokens, float[M]."""
    return torch.exp(sample_means(log_ratio, keep, batch))[batch.owners]


def sequence_advantages(advantages: torch.Tensor, keep: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """The mean of a sample's advantages at each of its tokens, float[M]."""
    return sample_means(advantages, keep, batch)[batch.owners]
