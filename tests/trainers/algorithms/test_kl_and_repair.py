"""KL estimators, rejection rules and approximated proximal policies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.trainers.algorithms import kl, proximal
from millrace.trainers.algorithms.presets import ICEPOP, KPOP, TIS
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.algorithms.repair import Rejection, clamp_marks, repair
from millrace.trainers.batches.packing import MicroBatch, pack
from millrace.trainers.errors import BadConfiguration
from tests.support.samples import random_samples
from tests.trainers.algorithms.weighing import current, weighed

RULES = [
    TIS,
    ICEPOP,
    KPOP,
    Rejection("sequence", "mask", "ratio", "mean", upper=1.1, lower=0.9),
    Rejection("sequence", "mask", "ratio", "sum", upper=2.0),
    Rejection("sequence", "mask", "ratio", "max", upper=1.5),
    Rejection("sequence", "clamp", "ratio", "mean", upper=1.05),
    Rejection("token", "mask", "kl_k1", upper=0.2, lower=-0.2),
    Rejection("token", "mask", "kl_k2", upper=0.02),
    Rejection("sequence", "mask", "kl_k3", "mean", upper=0.04),
    Rejection("sequence", "mask", "kl_k3", "max", upper=0.1),
    Rejection("sequence", "mask", "kl_k1", "sum", upper=0.3, lower=-0.3),
    Rejection("sequence", "mask", "ratio", "mean", upper=1.1, lower=0.9, weights="token"),
    Rejection("sequence", "mask", "kl_k1", "sum", upper=0.3, lower=-0.3, weights="sequence"),
    Rejection("token", "mask", "kl_k2", "max", upper=0.02, weights="sequence"),
]


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def row(*lengths: int) -> MicroBatch:
    """A micro-batch of samples with so many trainable tokens."""
    samples = random_samples(0, groups=1, group_size=len(lengths))[: len(lengths)]
    made = [
        replace(
            sample,
            **{name: getattr(sample, name)[:1].repeat(n + 1) for name in ("tokens", "logprobs", "versions")},
            mask=np.array([0] + [1] * n, np.uint8),
            trajectory=f"0.{index}",
            lineage=0,
        )
        for index, (sample, n) in enumerate(zip(samples, lengths, strict=True))
    ]
    return pack(made)


@pytest.mark.parametrize(("kind", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)])
def test_estimators(kind: str, value: float) -> None:
    assert kl.estimate(kind, column(-1.0), column(-1.5)).item() == pytest.approx(value)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_divergence(kind: str) -> None:
    p, q = column(0.6, 0.3, 0.1), column(0.2, 0.3, 0.5)
    assert (p * kl.estimate(kind, p.log(), q.log())).sum().item() == pytest.approx((p * (p / q).log()).sum().item())


@pytest.mark.parametrize(
    ("p", "q", "forward", "backward", "kept"),
    [
        (0.9, 0.1, 1.7578, 1.7578, True),
        (0.99, 0.01, 4.503, 4.503, False),
        (0.9, 1e-4, 7.964, 2.301, False),
        (0.999, 0.05, 2.985, 6.364, False),
        (0.5, 0.5, 0.0, 0.0, True),
    ],
)
def test_kpop_vectors(p: float, q: float, forward: float, backward: float, kept: bool) -> None:
    found = kl.bernoulli(column(p).log(), column(q).log())
    assert found.item() == pytest.approx(max(forward, backward), abs=1e-3)
    _, stays = repair(column(p).log(), column(q).log(), column(1), KPOP, row(1))
    assert bool(stays.item()) is kept


def test_a_ratio_of_nine_is_masked_by_icepop_and_kept_by_kpop() -> None:
    ours, theirs = column(0.9).log(), column(0.1).log()
    assert repair(ours, theirs, column(1), ICEPOP, row(1))[1].item() == 0
    assert repair(ours, theirs, column(1), KPOP, row(1))[1].item() == 1


def test_named_instances() -> None:
    ratios = column(0.4, 0.5, 1.0, 5.0, 6.0)
    zero = torch.zeros_like(ratios)
    one = torch.ones_like(ratios)
    weight, keep = repair(ratios.log(), zero, one, TIS, row(5))
    assert weight.tolist() == pytest.approx([0.4, 0.5, 1, 2, 2])
    assert keep.tolist() == [1] * 5
    weight, keep = repair(ratios.log(), zero, one, replace(ICEPOP, upper=5 + 1e-9, lower=0.5 - 1e-9), row(5))
    assert weight.tolist() == pytest.approx(ratios.tolist()), "what is kept keeps its raw weight"
    assert keep.tolist() == [0, 1, 1, 1, 0]
    even = repair(zero, zero, one, Rejection("token", "mask", "ratio", upper=2.0, lower=1.0), row(5))
    assert even[1].tolist() == [1] * 5, "bounds are inclusive"


def test_a_sample_is_judged_by_its_geometric_mean_and_gets_it_as_weight() -> None:
    batch = row(2, 3)
    d = column(math.log(4), math.log(1), math.log(8), 0, 0)
    rule = Rejection("sequence", "mask", "ratio", upper=1.99)
    weight, keep = repair(d, torch.zeros_like(d), torch.ones_like(d), rule, batch)
    assert weight.tolist() == pytest.approx([2, 2, 2, 2, 2])
    assert keep.tolist() == [0] * 5
    most = repair(d, torch.zeros_like(d), torch.ones_like(d), replace(rule, agg="max", upper=4.1), batch)
    assert most[1].tolist() == [1, 1, 0, 0, 0]
    masked = column(1, 1, 0, 1, 1)
    weight, keep = repair(d, torch.zeros_like(d), masked, rule, batch)
    assert weight.tolist() == pytest.approx([2, 2, 1, 1, 1]), "only masked tokens are aggregated"
    assert keep.tolist() == [0, 0, 0, 1, 1]


def test_samples_are_judged_whole_and_tokens_weighed() -> None:
    """The commonest pair: a mask of sequences by the geometric mean, weights of tokens; and the other way round."""
    batch = row(2, 3)
    d = column(math.log(4), math.log(1), math.log(8), 0, 0)
    rule = Rejection.parse({"level": "sequence", "metric": "ratio", "upper": 2.001, "weights": "token"})
    weight, keep = repair(d, torch.zeros_like(d), torch.ones_like(d), rule, batch)
    assert weight.tolist() == pytest.approx([4, 1, 8, 1, 1])
    assert keep.tolist() == [1] * 5
    weight, keep = repair(d, torch.zeros_like(d), torch.ones_like(d), replace(rule, upper=1.99), batch)
    assert weight.tolist() == pytest.approx([4, 1, 8, 1, 1])
    assert keep.tolist() == [0] * 5
    by_token = replace(rule, level="token", weights="sequence", upper=3.0)
    weight, keep = repair(d, torch.zeros_like(d), torch.ones_like(d), by_token, batch)
    assert weight.tolist() == pytest.approx([2] * 5)
    assert keep.tolist() == [0, 1, 0, 1, 1]


def test_what_is_not_finite_counts_as_no_difference() -> None:
    d = column(math.nan, math.inf, -math.inf, 0.0)
    weight, keep = repair(d, torch.zeros_like(d), torch.ones_like(d), ICEPOP, row(4))
    assert weight.tolist() == [1, 1, 1, 1]
    assert keep.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_rules_against_loops_over_samples(rule: Rejection, seed: int) -> None:
    samples = random_samples(seed, groups=2)
    batch = pack(samples)
    behaviour, prox = batch.behaviour.double(), current(batch, seed=seed)
    keep = (torch.arange(batch.trainable) % 4 != 0).double()
    weight, stays = repair(prox, behaviour, keep, rule, batch)
    for owner in range(batch.samples):
        at = [i for i in range(batch.trainable) if batch.owners[i] == owner]
        d = {i: float(prox[i] - behaviour[i]) for i in at}
        metric = {i: _metric(rule.metric, d[i], float(behaviour[i])) for i in at}
        if rule.level == "sequence":
            values = [metric[i] for i in at if keep[i]] or [0.0]
            joined = {"mean": sum(values) / len(values), "sum": sum(values), "max": max(values)}[rule.agg]
            metric = dict.fromkeys(at, joined)
        for i in at:
            of_sample = rule.level == "sequence" and rule.metric == "ratio" if rule.weights is None else None
            logs = [d[j] for j in at if keep[j]] or [0.0]
            joint = {"mean": sum(logs) / len(logs), "sum": sum(logs), "max": max(logs)}[rule.agg]
            raw = math.exp(joint if of_sample or rule.weights == "sequence" else d[i])
            compared = math.exp(metric[i]) if rule.metric == "ratio" else metric[i]
            low = rule.lower if rule.lower is not None else -math.inf
            inside = low <= compared <= rule.upper
            if rule.action == "clamp":
                assert weight[i].item() == pytest.approx(min(max(raw, rule.lower or 0), rule.upper))
                assert stays[i] == keep[i]
            else:
                assert weight[i].item() == pytest.approx(raw)
                assert stays[i] == keep[i] * inside


def _metric(kind: str, d: float, behaviour: float) -> float:
    if kind == "binary_kl":
        p, q = math.exp(behaviour + d), math.exp(behaviour)
        return max(
            a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))
            for a, b in [(min(max(x, 1e-8), 1 - 1e-8), min(max(y, 1e-8), 1 - 1e-8)) for x, y in ((p, q), (q, p))]
        )
    return {"ratio": d, "kl_k1": d, "kl_k2": d * d / 2, "kl_k3": math.exp(-d) - 1 + d}[kind]


def test_denominators_do_not_notice_what_is_rejected() -> None:
    samples = random_samples(3)
    strict = policy("icepop", rejection={"upper": 1.0001, "lower": 0.9999})
    batch = weighed(strict, samples)
    loss, sums = strict.loss(current(batch).requires_grad_(), torch.zeros(batch.trainable), batch)
    assert strict.count(batch) == sum(s.trainable for s in samples)
    assert float(sums["kept"]) + float(sums["rejected"]) == batch.trainable
    assert float(sums["rejected"]) > 0
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"upper": 1.0}, "above 1"),
        ({"lower": 0.0}, "above 0"),
        ({"metric": "kl_k2", "upper": 0.0}, "never negative"),
        ({"metric": "kl_k3", "upper": 1.0, "action": "clamp"}, "choose action = mask"),
        ({"metric": "binary_kl", "upper": 2.0, "lower": 1.0}, "takes none"),
        ({"upper": 2.0, "lower": 3.0}, "at most upper"),
        ({"agg": "sum"}, "set level = sequence"),
        ({"level": "turn"}, "none of token, sequence"),
        ({"uper": 2.0}, "has no 'uper'"),
        ({"weights": "turn"}, "none of token, sequence"),
        ({"action": "clamp", "weights": "sequence"}, "set level = sequence"),
        ("token", "rejection is a table"),
    ],
)
def test_wrong_rules_are_refused(given_: Any, message: str) -> None:
    with pytest.raises(BadConfiguration, match=message):
        Rejection.parse(given_)


# ---- the proximal policy


def test_alpha() -> None:
    versions = torch.tensor([-1, 0, 1, 2, 3, 4])
    found = proximal.alpha(versions, v_prox=3, v_theta=4)
    assert found.tolist() == pytest.approx([0, 3 / 4, 2 / 3, 1 / 2, 0, 0])
    fresh = proximal.alpha(versions, v_prox=3, v_theta=3)
    assert fresh.tolist() == [0, 1, 1, 1, 0, 0], "before the first step the current policy is the proximal one"


@given(st.floats(-5, -0.01), st.floats(-5, -0.01), st.integers(-1, 3))
def test_approximations_against_the_formulas(behaviour: float, theta: float, version: int) -> None:
    share = 0.0 if version in (-1, 3) else min(1.0, (2 - version) / (3 - version))

    def of(method: str) -> float:
        return proximal.approximate(
            method, column(theta), column(behaviour), torch.tensor([version]), v_prox=2, v_theta=3
        ).item()

    assert of("loglinear") == pytest.approx(behaviour + share * (theta - behaviour))
    mixed = (1 - share) * math.exp(behaviour) + share * math.exp(theta) + 1e-10
    assert of("linear") == pytest.approx(math.log(mixed))
    assert of("rollout") == behaviour
    assert of("reuse") == theta


def test_an_approximation_carries_no_gradient_and_must_be_finite() -> None:
    theta = column(-1.0).requires_grad_()
    versions = torch.tensor([0])
    assert not proximal.approximate("loglinear", theta, column(-2), versions, v_prox=1, v_theta=2).requires_grad
    with pytest.raises(BadConfiguration, match="recompute"):
        proximal.approximate("loglinear", theta, column(-math.inf), versions, v_prox=1, v_theta=2)


def test_the_first_generated_token_keeps_its_version() -> None:
    """Versions line up with the tokens they describe: the first generated token's alpha is that of its engine."""
    samples = random_samples(0, version=2)
    batch = pack(samples)
    first = [int(batch.versions[batch.owners == owner][0]) for owner in range(batch.samples)]
    assert first == [int(m.versions[m.mask != 0][0]) for m in batch.members]
    assert min(first) >= 0
    shares = proximal.alpha(batch.versions, v_prox=2, v_theta=3)
    assert (shares[batch.versions < 2] > 0).all()


def test_metrics_reports_how_far_the_approximations_are_off() -> None:
    algorithm = policy("decoupled", proximal="metrics")
    batch = weighed(algorithm, random_samples(0))
    _, sums = algorithm.loss(current(batch), torch.zeros(batch.trainable), batch)
    assert tuple(sums) == algorithm.measures
    assert all(float(sums[f"error_{kind}"]) > 0 for kind in proximal.APPROXIMATIONS)


def test_reuse_is_the_recomputed_policy_while_there_is_one_step() -> None:
    samples = random_samples(0)
    reuse = policy("decoupled", proximal="reuse", minibatches=1)
    batch = weighed(reuse, samples)
    logp = current(batch)
    exact = policy("decoupled")
    theirs, _ = exact.loss(logp, torch.zeros_like(logp), batch.attach(proximal=logp))
    assert float(reuse.loss(logp, torch.zeros_like(logp), batch)[0]) == pytest.approx(float(theirs))


def test_a_clamp_says_which_tokens_it_changed() -> None:
    ratios = torch.tensor([0.4, 0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    zero, one = torch.zeros_like(ratios), torch.ones_like(ratios)
    share = clamp_marks(ratios.log(), zero, one, replace(TIS, upper=2 + 1e-9), row(5))
    assert share.tolist() == [0, 0, 0, 0, 1]
    share = clamp_marks(ratios.log(), zero, one, replace(TIS, upper=2 + 1e-9, lower=0.5 - 1e-9), row(5))
    assert share.tolist() == [1, 0, 0, 0, 1]
    weight, _ = repair(ratios.log(), zero, one, TIS, row(5))
    assert ((weight - ratios).abs() > 1e-6).tolist() == [False, False, False, False, True]
    assert "clamped" in policy("tis").measures
    assert "clamped" not in policy("icepop").measures
