"""How far a selection is from the weights that are to learn from it. Pure.

With d_t = log p_start(token t) - log p_sampled(token t), over the tokens that train:

    w_i      = exp(sum_t d_t) of sample i           importance weight of a whole sample
    w_t      = exp(d_t)                             of a single token
    ESS(w)   = (sum w)^2 / sum w^2                  Kish 1965; as a share of n in (0, 1]: 1 where all are equal
    k3       = mean_t (exp(d_t) - 1 - d_t)          estimates KL(sampled || start), http://joschu.net/blog/kl-approx.html
    outside  = share of tokens with w_t not in [0.5, 2]

Weights are compared in log space, so that no exponential overflows. A low share says that few samples carry the whole
gradient. It is judged by sequences: tokens alone look better than they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.infra.errors import BranchError

Floats = NDArray[np.float64]

WARN, REFUSE = 0.3, 0.05
"""shares of the effective sample size of sequences: below the first it is said, below the second nothing is trained"""
LOW, HIGH = 0.5, 2.0


@dataclass(frozen=True, slots=True)
class Reach:
    """sequences, tokens: how many were scored; the two shares of effective sample size; kl in nats a token, infinite
    where it overflows; outside: share of token ratios outside [0.5, 2]."""

    sequences: int
    tokens: int
    sequence_ess: float
    token_ess: float
    kl: float
    outside: float

    @property
    def word(self) -> str:
        """good, low or refused."""
        return "refused" if self.sequence_ess < REFUSE else "low" if self.sequence_ess < WARN else "good"


def effective(logs: Floats) -> float:
    """ESS / n of weights given by their logarithms, float64[n]; 0 of none. What is not finite counts as weight 0."""
    if not len(logs):
        return 0.0
    finite = logs[np.isfinite(logs)]
    if not len(finite):
        return 0.0
    weights = np.exp(finite - finite.max())
    return float(weights.sum() ** 2 / (weights**2).sum() / len(logs))


def reach(differences: Sequence[Floats]) -> Reach:
    """Of samples by d_t, float64[T_i] each. Those without a token count nowhere."""
    some = [gap for gap in differences if len(gap)]
    flat = np.concatenate([np.zeros(0), *some])
    sums = np.array([gap.sum() for gap in some])
    with np.errstate(over="ignore", invalid="ignore"):
        gaps = np.expm1(flat) - flat
    inside = (flat >= math.log(LOW)) & (flat <= math.log(HIGH))
    return Reach(
        sequences=len(some),
        tokens=len(flat),
        sequence_ess=effective(sums),
        token_ess=effective(flat),
        kl=float(gaps.mean()) if len(flat) else 0.0,
        outside=float(1 - inside.mean()) if len(flat) else 0.0,
    )


def refuse(reach: Reach) -> None:
    """Raises BranchError where too little of the selection would carry the gradient."""
    if reach.word == "refused":
        raise BranchError(
            f"the selection is too far from the starting weights: {reach.sequence_ess:.3f} of its sequences count, "
            f"below {REFUSE} (ESS/n). Begin at a version nearer to it, select newer samples, learn by sft or dpo, "
            "or say --anyway"
        )
