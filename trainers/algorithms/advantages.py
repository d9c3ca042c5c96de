"""From rewards to one advantage a token, in float64.

    1  r -= overlong penalty                          of the longest reply that comes near the limit
    2  r = (r + bias) * scale
    3  r = clip(r, -c, c)
    4  r = normalised over group or batch             `normalisation.py`
    5  r_t = - coef * KL(old || reference)_t          on each trainable token, `kl.py`
    6  r_last += r                                    the last trainable token earns the outcome
    7  delta_t = r_t + gamma V_{t+1} - V_t            generalised advantage estimation, from right to left
       A_t = delta_t + gamma lambda A_{t+1}
    8  R_t = A_t + V_t
    9  A = normalised over the batch's tokens, if asked

GAE: https://arxiv.org/abs/1506.02438; overlong penalty: https://arxiv.org/abs/2503.14476, equation 13.

A limit of the engine bounds one reply, so the penalty is one of a reply: trainable tokens without another between them.
A trajectory of several, over all of its lineages, has the penalty of its longest; how many there are costs nothing.

Masked tokens are skipped: the next trainable token is the next step, whatever lies between. So a sample is the list of
its trainable tokens here, and a batch is flat: float64[M], samples one after the other, with `lengths` int[S]. Without
a critic V = 0; with gamma = lambda = 1 every token then gets the outcome less the KL to go. An advantage belongs to a
trajectory; each of its lineages gets it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Ints = NDArray[np.int64]


def overlong_penalty(lengths: F64, *, limit: int, buffer: int, factor: float) -> F64:
    """What to add to the rewards of replies of `lengths` tokens: 0 up to limit - buffer, then falling to -factor at
    the limit, and -factor beyond it."""
    return np.clip(-(lengths - (limit - buffer)) / buffer, -1.0, 0.0) * factor


def shape(rewards: F64, *, bias: float, scale: float, clip: float) -> F64:
    """clip((r + bias) * scale, -clip, clip)."""
    return np.clip((rewards + bias) * scale, -clip, clip)


def outcome_rewards(per_token: F64, lengths: Ints, outcomes: F64) -> F64:
    """per_token float64[M] with each sample's outcome (float64[S]) added to its last token."""
    out = per_token.copy()
    some = lengths > 0
    out[np.cumsum(lengths)[some] - 1] += outcomes[some]
    return out


def gae(rewards: F64, values: F64, lengths: Ints, *, discount: float, lam: F64, bootstrap: F64) -> F64:
    """Advantages float64[M]. lam, bootstrap float64[S]: lambda and V after the last token, by sample."""
    out = np.zeros(len(rewards))
    ends = np.cumsum(lengths)
    order = np.argsort(-lengths, kind="stable")
    ahead, following = np.zeros(len(lengths)), bootstrap.astype(np.float64)
    for back in range(1, int(lengths.max(initial=0)) + 1):
        live = order[: int((lengths >= back).sum())]
        at = ends[live] - back
        delta = rewards[at] + discount * following[live] - values[at]
        ahead[live] = delta + discount * lam[live] * ahead[live]
        following[live] = values[at]
        out[at] = ahead[live]
    return out


def by_turn(turns: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """turns int[M], non-decreasing in a sample -> where each turn begins int[K], turns by sample int[S]. Ids count
    only as equal or different, so gaps and unused ids cost no discount."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    fresh = np.ones(len(turns), bool)
    fresh[1:] = (np.diff(turns) != 0) | (np.diff(owners) != 0)
    starts = np.flatnonzero(fresh)
    return starts, np.bincount(owners[starts], minlength=len(lengths)).astype(np.int64)


def turn_gae(
    rewards: F64, values: F64, turns: Ints, lengths: Ints, *, discount: float, lam: F64, bootstrap: F64
) -> tuple[F64, F64]:
    """Advantages and returns float64[M] where a step is a turn: its rewards summed, its value that of its first token,
    its advantage every token's."""
    starts, counts = by_turn(turns, lengths)
    if not len(starts):
        return np.zeros(0), np.zeros(0)
    turn_rewards, first = np.add.reduceat(rewards, starts), values[starts]
    by_turn_estimate = gae(turn_rewards, first, counts, discount=discount, lam=lam, bootstrap=bootstrap)
    sizes = np.diff([*starts, len(rewards)])
    return np.repeat(by_turn_estimate, sizes), np.repeat(by_turn_estimate + first, sizes)


def lambdas(kind: str, value: float, lengths: Ints) -> F64:
    """lambda by sample, float64[S]: `value` itself (constant); max(0, 1 - 1 / (value L)), which looks further in longer
    replies (length); value ** (1 / (L - 1)), so that the first token sees `value` of the last (relative)."""
    sizes = np.maximum(lengths, 1).astype(np.float64)
    match kind:
        case "length":
            return np.maximum(0.0, 1.0 - 1.0 / (value * sizes))
        case "relative":
            return np.asarray(np.where(sizes > 1, value ** (1.0 / np.maximum(sizes - 1, 1)), value))
        case _:
            return np.full(len(lengths), value)


def turns_of(masks: Sequence[NDArray[np.uint8]]) -> Ints:
    """Turn ids int[M] of the trainable tokens: what was generated in one piece is a turn."""
    return np.asarray(np.concatenate([np.zeros(0, np.int64), *(_pieces(mask) for mask in masks)]), np.int64)


def longest_reply(mask: NDArray[np.uint8]) -> int:
    """Tokens of the longest reply of a sample's mask uint8[T], 0 where there is none."""
    return int(np.bincount(_pieces(mask)).max(initial=0))


def _pieces(mask: NDArray[np.uint8]) -> Ints:
    on = mask != 0
    begins = on & ~np.concatenate([[False], on[:-1]])
    return np.asarray(np.cumsum(begins)[on], np.int64)
