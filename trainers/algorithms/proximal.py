"""The proximal policy: the weights that a batch started from, around which the ratio is clipped.

    recompute   a forward pass before the first optimizer step: exact
    loglinear   logp_behav + alpha (logp_theta - logp_behav)
    linear      log((1 - alpha) p_behav + alpha p_theta + 1e-10)
    rollout     logp_behav
    reuse       logp_theta, held fixed: exact while there is one optimizer step a batch

    alpha = clamp((v_prox - v_behav) / (v_theta - v_behav), 0, 1);  0 if v_behav < 0 or v_theta <= v_behav

Decoupled from the policy that sampled: https://arxiv.org/abs/2110.00641, in asynchronous RL https://arxiv.org/abs/2505.24298;
loglinear: https://arxiv.org/abs/2512.06547.

The approximations save the forward pass. v_behav is each token's own version: columns are indexed by the token they
describe, so nothing is off by one. v_prox and v_theta are the caller's: here a batch that starts from version k has
v_prox = k, and v_theta = k + (optimizer steps made) / (optimizer steps of the batch). The frameworks that count v_theta
as the engine's version, one above v_prox, are met with `lag` = 1.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from millrace.trainers.errors import BadConfiguration

Method: TypeAlias = Literal["recompute", "metrics", "loglinear", "linear", "rollout", "reuse"]
METHODS = ("recompute", "metrics", "loglinear", "linear", "rollout", "reuse")
FORWARD = ("recompute", "metrics")
"""Methods that need the forward pass; metrics also reports how far the approximations are off."""
APPROXIMATIONS = ("loglinear", "linear", "rollout")
FLOOR = 1e-10


def alpha(versions: torch.Tensor, *, v_prox: float, v_theta: float) -> torch.Tensor:
    """int64[M] -> float64[M]: how far from the behaviour policy to the current one the proximal policy lies."""
    behind = v_theta - versions.double()
    share = ((v_prox - versions) / torch.where(behind > 0, behind, 1.0)).clamp(0.0, 1.0)
    return torch.where((versions < 0) | (behind <= 0), 0.0, share)


def approximate(
    method: str,
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    versions: torch.Tensor,
    *,
    v_prox: float,
    v_theta: float,
) -> torch.Tensor:
    """float[M] of the current policy and of the behaviour policy, int64[M] -> float[M] without gradient. Raises
    BadConfiguration where the result is not finite."""
    theta = logprobs.detach()
    share = alpha(versions, v_prox=v_prox, v_theta=v_theta).to(theta)
    match method:
        case "reuse":
            return theta
        case "loglinear":
            out = behaviour + share * (theta - behaviour)
        case "linear":
            out = torch.log((1 - share) * torch.exp(behaviour) + share * torch.exp(theta) + FLOOR)
        case _:
            out = behaviour
    if not torch.isfinite(out[torch.isfinite(theta)]).all():
        raise BadConfiguration(f"{method} gave a log-probability that is not finite; set proximal = recompute")
    return out
