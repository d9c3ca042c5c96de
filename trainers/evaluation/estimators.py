"""Estimates from several judged answers to each question, with confidence intervals over the questions.

    pass@k = mean over questions of 1 - C(n - c, k) / C(n, k)         n answers, c of them right; unbiased

An interval is the percentile bootstrap over questions, seeded; with k answers a question pass@k is a plain share and
has Wilson's interval instead, which is not empty when all are right or all are wrong. Questions are drawn whole:
answers to one question are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

DRAWS = 10_000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `questions` questions, and its interval."""

    value: float
    low: float
    high: float
    questions: int


def pass_at_k(n: int, right: int, k: int) -> float:
    """The chance that of k answers out of n at least one is among the `right` ones. ValueError unless 1 <= k <= n."""
    if not 1 <= k <= n or not 0 <= right <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {right} of {n} answers")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def bootstrap(values: Sequence[float], seed: int, level: float = LEVEL, draws: int = DRAWS) -> Estimate:
    """The mean of one value a question."""
    column = np.asarray(values, np.float64)
    if not len(column):
        return Estimate(math.nan, math.nan, math.nan, 0)
    draw = np.random.Generator(np.random.PCG64(seed))
    means = np.array([column[draw.integers(0, len(column), len(column))].mean() for _ in range(draws)])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(column.mean()), float(low), float(high), len(column))


def wilson(right: int, questions: int, level: float = LEVEL) -> Estimate:
    """The share of `questions` that count as answered right."""
    if not questions:
        return Estimate(math.nan, math.nan, math.nan, 0)
    z, share = NormalDist().inv_cdf((1 + level) / 2), right / questions
    scale = 1 + z * z / questions
    middle = (share + z * z / (2 * questions)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / questions + z * z / (4 * questions * questions))
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half), questions)


def summary(
    rewards: Sequence[Sequence[float]], ks: Sequence[int], *, success: float = 1.0, seed: int = 0
) -> dict[str, Estimate]:
    """`mean` and each `pass@k` from the rewards of each question's judged answers.

    An answer is right from a reward of `success` on. Questions with fewer than k judged answers do not count for
    pass@k: `questions` says how many did."""
    answers = [values for values in rewards if len(values)]
    out = {"mean": bootstrap([math.fsum(values) / len(values) for values in answers], seed)}
    for k in ks:
        enough = [(len(values), sum(value >= success for value in values)) for values in answers if len(values) >= k]
        if all(n == k for n, _ in enough):
            out[f"pass@{k}"] = wilson(sum(right > 0 for _, right in enough), len(enough))
        else:
            out[f"pass@{k}"] = bootstrap([pass_at_k(n, right, k) for n, right in enough], seed)
    return out
