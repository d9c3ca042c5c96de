"""How long a version takes, and how many engines a learner needs, without a simulation.

B groups of G replies; W tokens a reply in the mean, L the longest of B G (of G under release `soft`); E engines of C
replies at once, a token every a + c b seconds with c of them; T seconds a step. Seconds between two versions:

    learner     T
    engines     B G W (a / min(C, (eta + 1) B G / E) + b) / E
    stragglers  (a L + q / 2 + T) / (eta + 1) + b B G W / E     q = a B G W / (C E) where B G > C E, else 0

and together the norm of order SHARP of the three: their largest, and a little more where two are near. Stragglers are
the price of the bound. What is granted as version v comes must be learned by v + eta, and nothing is granted in
between, so eta + 1 periods hold the longest reply and a step, and half of the time that engines need to take a batch
in. Under `soft` nothing waits for one reply; but with (eta + 1) B groups under way each of them, which is over when
its longest reply is, takes its part of eta + 1 periods all the same (Little's law). For eta = 0 it is the synchronous
generation + training."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

from benchmarks.study_async.simulation import Engines, Lengths, Policy

SHARP = 12
CELLS = 400
NEAR = 1.1
"""enough engines: a version takes at most so much of what it would with as many as one likes"""
MANY = 1 << 20


@cache
def longest(lengths: Lengths, count: int) -> float:
    """Mean of the longest of so many replies, in tokens; of one reply for 1. By its tail: E X is the integral of
    1 - F(x)^count."""
    if not lengths.sigma:
        return min(lengths.mean, lengths.most)
    centre = math.log(lengths.mean) - lengths.sigma**2 / 2
    cell = min(lengths.most, math.exp(centre + 6 * lengths.sigma)) / CELLS
    normal = NormalDist(centre, lengths.sigma)
    return cell * sum(1 - normal.cdf(math.log((number + 0.5) * cell)) ** count for number in range(CELLS))


class Bounds(NamedTuple):
    """Seconds a version takes at least, for each of three reasons."""

    learner: float
    engines: float
    stragglers: float

    @property
    def period(self) -> float:
        """Of all together."""
        return max(self) * float(sum((part / max(self)) ** SHARP for part in self) ** (1 / SHARP))

    @property
    def name(self) -> str:
        """Of the largest."""
        return self._fields[self.index(max(self))]


def bounds(policy: Policy, engines: Engines, lengths: Lengths, step_s: float) -> Bounds:
    """The formula above."""
    replies, eta, places = policy.batch * policy.group_size, policy.eta, engines.concurrency
    share = replies / engines.count
    work = share * longest(lengths, 1)
    alone, crowd = work * engines.token_s, work * engines.crowd_s
    intake = alone / places if share > places else 0.0
    last = engines.token_s * longest(lengths, policy.group_size if policy.release == "soft" and eta else replies)
    if not eta:
        last = max(last, alone / min(places, share) - intake / 2)
    return Bounds(
        step_s, alone / min(places, (eta + 1) * share) + crowd, (last + intake / 2 + step_s) / (eta + 1) + crowd
    )


def by_hand(policy: Policy, engines: Engines, lengths: Lengths, step_s: float) -> float:
    """Seconds a version as the page has one work it out, for engines that do not slow down with company."""
    replies = policy.batch * policy.group_size
    longest_s, mean_s = (engines.token_s * longest(lengths, count) for count in (replies, 1))
    taking_s = replies * mean_s / engines.concurrency / engines.count
    return max(step_s, (longest_s + step_s) / (policy.eta + 1), taking_s)


def engines_for(policy: Policy, engines: Engines, lengths: Lengths, step_s: float) -> int:
    """The fewest engines that are enough."""

    def speed(count: int) -> float:
        return -bounds(policy, replace(engines, count=count), lengths, step_s).period

    return bisect_left(range(1, MANY), NEAR * speed(MANY), key=speed) + 1
