"""Service times that the study is run with, and where each number is from.

AReaL: arXiv 2505.24298, as read in our notes of it (hours, steps and GPUs of its table of four models, and tokens a
second by eta of its ablation with 1.5B, read off a figure). It gives no split of a step into generation and training,
no lengths but their limit, and no rate of an engine. What follows from what it gives, and what we assume, is said
here beside each number."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from benchmarks.study_async.rule import longest
from benchmarks.study_async.simulation import Engines, Learners, Lengths

RATES = {0: 128.7, 1: 269.3, 2: 356.6, 8: 371.7, 16: 382.4}
"""AReaL's ablation, 1.5B: thousand tokens a second by eta. Its row for eta 4 repeats that of eta 2 and is left out."""
SATURATED = 396.8
"""the same without a bound"""
STEP_TOKENS = 76.0e6
"""tokens of a step at 1.5B: 41.0 h / 250 steps x 128.7 k/s, and 14.8 h / 250 x 356.6 k/s, both give 76.0 M"""
BATCH, GROUP_SIZE, MOST = 512, 16, 27_648
"""AReaL's prompts a step, answers a prompt, longest answer"""
SIGMA = 0.6
"""of the logarithm of lengths: assumed"""
PLACES = 256
"""replies at once in one engine: assumed, more than ever run"""
SCALE = 4
"""the study runs a quarter of each regime: a quarter of the prompts, engines and learners, so that periods stay"""


@dataclass(frozen=True, slots=True)
class Regime:
    """One of AReaL's rows. Hours are of all steps; a node has 8 GPUs, three quarters of which sample."""

    name: str
    nodes: int
    steps: int
    synchronous_h: float
    asynchronous_h: float

    @property
    def synchronous_s(self) -> float:
        """Seconds of a step at eta 0."""
        return self.synchronous_h * 3600 / self.steps

    @property
    def training_s(self) -> float:
        """At most so long does a step train: what a version takes without a bound. Published for 1.5B alone; for the
        others the asynchronous step, which may have waited."""
        return STEP_TOKENS / SATURATED / 1000 if self.name == "1.5B" else self.asynchronous_h * 3600 / self.steps

    def parts(self) -> tuple[Engines, Lengths, Learners]:
        """A quarter of its engines, and learners as one that is as fast as all. A token's seconds are such that the
        rule gives the published steps at eta 0 and, for 1.5B, at eta 1 under `soft`; the others keep the ratio of the
        two."""
        lengths, first = reply_lengths(), REGIMES[0]
        group, batch = longest(lengths, GROUP_SIZE), longest(lengths, BATCH * GROUP_SIZE)
        generation_s = first.synchronous_s - first.training_s
        alone = (generation_s + first.training_s / 2 - STEP_TOKENS / RATES[1] / 1000) / (batch - group / 2)
        part = (self.synchronous_s - self.training_s) / generation_s
        engines = self.nodes * 8 * 3 // 4 // SCALE
        crowd = (generation_s - alone * batch) * engines * SCALE / STEP_TOKENS
        learners = Learners(token_s=self.training_s * SCALE / STEP_TOKENS)
        return Engines(engines, PLACES, alone * part, crowd * part), lengths, learners


@cache
def reply_lengths() -> Lengths:
    """Lognormal, cut at the limit, with the mean that 76.0 M tokens a step leave to 8,192 answers."""
    mean = STEP_TOKENS / BATCH / GROUP_SIZE
    low, high = mean, 3 * mean
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if longest(Lengths(middle, SIGMA, MOST), 1) < mean else (low, middle)
    return Lengths(low, SIGMA, MOST)


REGIMES = (
    Regime("1.5B", 16, 250, 41.0, 14.8),
    Regime("7B", 24, 250, 57.7, 25.4),
    Regime("14B", 32, 80, 48.8, 21.9),
    Regime("32B", 48, 60, 51.1, 31.1),
)
"""AReaL's models: nodes, steps, hours synchronous and asynchronous"""

SMALL = (Engines(4, 8, 1.0), Lengths(5.0, 1.0, 27.0))
"""32 places, replies of 5 s in the mean and 27 at most; sigma is such that the longest of eight takes 13 s"""

CLUSTER = (Engines(1, 128, 0.0128, 59e-6), Lengths(1000.0, 0.8, 4000.0))
"""an engine as 1.5B's above, with short replies"""
RANK = Learners(1, 1 / 19_847, reduce_s=0.1, fixed_s=2.0, minibatches=2)
"""our own step at 0.6B on one H100, 19,847 tokens a second and 2 s to gather a version (measured, 2026-11); that all-
reduce takes .1 s is assumed"""


def cluster(engines: int, ranks: int) -> tuple[Engines, Lengths, Learners]:
    """So many of both."""
    return replace(CLUSTER[0], count=engines), CLUSTER[1], replace(RANK, count=ranks)
