"""Knobs in any combination against their documents, in plain loops over float64: `knobs.py`, `advantages.py`,
`normalisation.py`, `repair.py`, `policy_loss.py` and `aggregation.py`, read again by somebody who shares none of their
code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from millrace.trainers.algorithms.knobs import Knobs
from millrace.trainers.algorithms.normalisation import Norm
from millrace.trainers.algorithms.policy import PolicyGradient
from millrace.trainers.algorithms.repair import Rejection
from millrace.trainers.batches.packing import PROXIMAL, REFERENCE, TEACHER
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration
from tests.support.samples import random_samples
from tests.trainers.algorithms.weighing import by_sample, current, draw_scores, weighed

Key = tuple[str, str]


def normalised(values: dict[Any, float], groups: dict[Any, str], norm: Norm | None) -> dict[Any, float]:
    """Those of `values` that take part, by whom they belong to."""
    if norm is None:
        return values

    def peers(one: Any, level: str | None) -> list[float]:
        return [x for other, x in values.items() if level == "batch" or groups[other] == groups[one]]

    out = {}
    for one, x in values.items():
        mean, divisor = 0.0, 1.0
        if norm.mean_level:
            all_of = peers(one, norm.mean_level)
            mean = sum(all_of) / len(all_of)
            if norm.mean_leave1out:
                mean = (sum(all_of) - x) / (len(all_of) - 1) if len(all_of) > 1 else x
        if norm.std_level:
            all_of = peers(one, norm.std_level)
            n, middle = len(all_of), sum(all_of) / len(all_of)
            less = n - 1 if norm.std_unbiased else n
            divisor = (math.sqrt(sum((y - middle) ** 2 for y in all_of) / less) if less else 1.0) + norm.eps
        out[one] = (x - mean) / divisor
    return out


def estimate(kind: str, d: Any, exp: Callable[[Any], Any]) -> Any:
    return {"k1": lambda: d, "k2": lambda: d * d / 2, "k3": lambda: exp(-d) - 1 + d}[kind]()


class Reading:
    """Of one batch under `k`: keep and advantage of each trainable token, by sample."""

    def __init__(self, k: Knobs, samples: Sequence[Sample], oldest: int | None, scores: Any) -> None:
        self.k, self.scores = k, scores
        self.samples = [s for s in samples if not (k.mask_truncated and s.truncated)]
        self.at = {s: np.flatnonzero(s.mask) for s in self.samples}
        self.behaviour = {s: s.logprobs[self.at[s]].astype(float) for s in self.samples}
        asks_proximal = (k.decoupled and k.proximal == "recompute") or (not k.decoupled and k.recompute)
        self.old = {s: scores[PROXIMAL][s].astype(float) if asks_proximal else self.behaviour[s] for s in self.samples}
        self.keep = {
            s: [s.reward is not None and (oldest is None or v >= oldest) for v in s.versions[self.at[s]]]
            for s in self.samples
        }
        self.advantage = self._advantages(asks_proximal)

    def repaired(self, s: Sample) -> tuple[list[float], list[bool]]:
        """Weights, and what is kept."""
        rule, keep = self.k.rejection, self.keep[s]
        d = [p - b for p, b in zip(self.old[s], self.behaviour[s], strict=True)]
        if rule is None:
            return [math.exp(x) for x in d], keep

        def level(of: list[float], name: str) -> list[float]:
            if name == "token":
                return of
            those = [x for x, kept in zip(of, keep, strict=True) if kept]
            joined = (
                0.0 if not those else {"mean": sum(those) / len(those), "sum": sum(those), "max": max(those)}[rule.agg]
            )
            return [joined] * len(of)

        weights = [math.exp(x) for x in level(d, rule.weights or (rule.level if rule.metric == "ratio" else "token"))]
        if rule.action == "clamp":
            return [min(max(w, rule.lower or 0.0), rule.upper) for w in weights], keep
        if rule.metric == "ratio":
            measure = [math.exp(x) for x in level(d, rule.level)]
        else:
            measure = level([estimate(rule.metric[-2:], x, math.exp) for x in d], rule.level)
        inside = [m <= rule.upper and (rule.lower is None or m >= rule.lower) for m in measure]
        return weights, [a and b for a, b in zip(keep, inside, strict=True)]

    def _advantages(self, asks_proximal: bool) -> dict[Sample, list[float]]:
        k = self.k
        knows_rejection = k.rejection is not None and k.rejection.action == "mask" and asks_proximal
        may = {s: any(self.repaired(s)[1]) if knows_rejection else any(self.keep[s]) for s in self.samples}
        key = {s: (s.group, s.trajectory) for s in self.samples}
        rewards: dict[Key, float] = {key[s]: float(s.reward) for s in self.samples if may[s] and s.reward is not None}
        for one in rewards:
            if k.overlong_tokens:
                mine = [s for s in self.samples if key[s] == one]
                longest = max(max(map(len, "".join(map(str, s.mask)).split("0"))) for s in mine)
                over = (k.max_new_tokens - k.overlong_tokens - longest) / k.overlong_tokens
                rewards[one] += k.overlong_factor * min(0.0, max(-1.0, over))
            rewards[one] = min(max((rewards[one] + k.reward_bias) * k.reward_scale, -k.reward_clip), k.reward_clip)
        groups = {one: one[0] for one in rewards}
        by_group = any(n and "group" in (n.mean_level, n.std_level) for n in (k.reward_norm, k.advantage_norm))
        teaches = {
            one: not by_group or len({round(r, 9) for other, r in rewards.items() if other[0] == one[0]}) > 1
            for one in rewards
        }
        chosen = normalised({one: r for one, r in rewards.items() if teaches[one]}, groups, k.reward_norm)
        if k.reward_norm is None:
            chosen = rewards
        tokens: dict[tuple[Sample, int], float] = {}
        for s in self.samples:
            ahead, lam = 0.0, k.gae_lambda
            for t in reversed(range(len(self.at[s]))):
                r = 0.0
                if k.kl_coef and self.keep[s][t]:
                    d = self.old[s][t] - float(self.scores[REFERENCE][s][t])
                    r = -k.kl_coef * min(10.0, max(-10.0, estimate(k.kl_estimator, d, math.exp)))
                if t == len(self.at[s]) - 1:
                    r += chosen.get(key[s], 0.0)
                ahead = r + k.discount * lam * ahead
                if may[s] and teaches.get(key[s], False) and self.keep[s][t]:
                    tokens[s, t] = ahead
        tokens = normalised(tokens, {one: one[0].group for one in tokens}, k.advantage_norm)
        return {s: [tokens.get((s, t), 0.0) for t in range(len(self.at[s]))] for s in self.samples}

    def loss(self, logp: dict[Sample, torch.Tensor], entropy: dict[Sample, torch.Tensor]) -> torch.Tensor:
        k, total, count = self.k, torch.zeros((), dtype=torch.float64), 0.0
        low, high = k.clip_low, k.clip_low if k.clip_high is None else k.clip_high
        for s in self.samples:
            n, keep = len(self.at[s]), self.keep[s]
            weights, stays = self.repaired(s) if k.decoupled else ([1.0] * n, keep)
            gaps = [logp[s][t] - self.old[s][t] for t in range(n)]
            those = [t for t in range(n) if keep[t]]
            mean_gap = sum(gaps[t] for t in those) / max(1, len(those))
            mean_advantage = sum(self.advantage[s][t] for t in those) / max(1, len(those))
            for t in range(n):
                if not stays[t]:
                    continue
                a, u = self.advantage[s][t], torch.exp(gaps[t])
                if k.ratio_level == "sequence" or k.objective == "gmpo":
                    a, u = mean_advantage, torch.exp(torch.as_tensor(mean_gap))
                if k.objective == "clip":
                    one = -torch.min(u * a, u.clamp(1 - low, 1 + high) * a)
                    if k.dual_clip is not None and a < 0:
                        one = torch.min(one, torch.as_tensor(-k.dual_clip * a, dtype=torch.float64))
                elif k.objective == "sapo":
                    tau = k.sapo_tau_pos if a > 0 else k.sapo_tau_neg
                    one = -4 / tau * torch.sigmoid(tau * (u - 1)) * a
                elif k.objective == "cispo":
                    one = -u.detach().clamp(1 - low, 1 + high) * a * logp[s][t]
                else:
                    sign = 1 if a > 0 else -1
                    bounded = [sign * torch.min(sign * gaps[i], sign * gaps[i].clamp(-low, high)) for i in those]
                    one = -torch.exp(sum(bounded) / len(those)) * a
                one = weights[t] * one
                if k.teacher_coef:
                    pull = torch.exp(gaps[t]) * (logp[s][t].detach() - float(self.scores[TEACHER][s][t]))
                    one = k.rl_coef * one + k.teacher_coef * pull
                if k.kl_loss_coef:
                    d = logp[s][t] - float(self.scores[REFERENCE][s][t])
                    one = one + k.kl_loss_coef * estimate(k.kl_estimator, d, torch.exp)
                one = one - k.entropy_coef * entropy[s][t]
                total = total + (one / n if k.aggregation == "sequence" else one)
            count += {"token": n, "sequence": 1, "constant": k.max_new_tokens}[k.aggregation]
        return total / count


LEVEL = st.sampled_from(["batch", "group", None])
NORM = st.none() | st.builds(
    lambda mean, std, leave, unbiased: Norm(mean, std, leave and mean is not None, unbiased),
    LEVEL,
    LEVEL,
    st.booleans(),
    st.booleans(),
)
REJECTION = st.one_of(
    st.none(),
    st.builds(
        dict,
        level=st.sampled_from(["token", "sequence"]),
        action=st.sampled_from(["mask", "clamp"]),
        metric=st.sampled_from(["ratio", "kl_k1", "kl_k2", "kl_k3"]),
        agg=st.sampled_from(["mean", "sum", "max"]),
        upper=st.sampled_from([1.21, 2.0]),
        lower=st.sampled_from([None, 0.73]),
        weights=st.sampled_from([None, "token", "sequence"]),
    ),
)
KNOBS = st.fixed_dictionaries(
    {},
    optional={
        "mask_truncated": st.booleans(),
        "overlong_tokens": st.sampled_from([0, 3, 6]),
        "overlong_factor": st.sampled_from([0.5, 2.0]),
        "max_new_tokens": st.just(7),
        "reward_bias": st.sampled_from([-1.0, 0.3]),
        "reward_scale": st.sampled_from([0.5, 3.0]),
        "reward_clip": st.sampled_from([0.7, 1.5]),
        "reward_norm": NORM,
        "advantage_norm": NORM,
        "kl_coef": st.sampled_from([0.0, 0.1]),
        "kl_loss_coef": st.sampled_from([0.0, 0.2]),
        "kl_estimator": st.sampled_from(["k1", "k2", "k3"]),
        "discount": st.sampled_from([1.0, 0.9]),
        "gae_lambda": st.sampled_from([1.0, 0.8, 0.0]),
        "objective": st.sampled_from(["clip", "sapo", "cispo", "gmpo"]),
        "ratio_level": st.sampled_from(["token", "sequence"]),
        "clip_low": st.sampled_from([0.1, 0.3]),
        "clip_high": st.sampled_from([None, 0.17]),
        "dual_clip": st.sampled_from([None, 1.3]),
        "entropy_coef": st.sampled_from([0.0, 0.05]),
        "aggregation": st.sampled_from(["token", "sequence", "constant"]),
        "teacher_coef": st.sampled_from([0.0, 0.3]),
        "rl_coef": st.sampled_from([1.0, 0.6]),
        "recompute": st.booleans(),
        "decoupled": st.booleans(),
        "proximal": st.sampled_from(["recompute", "rollout"]),
        "rejection": REJECTION,
    },
)


def odd_samples(seed: int) -> list[Sample]:
    """Some cut off, some without a reward, groups of one size and another."""
    draw = np.random.default_rng([9, seed])
    out = []
    for s in random_samples(seed, groups=3, group_size=4, longest=14, version=1):
        fate = np.random.default_rng([seed, s.seq, int(s.trajectory.split(".")[1])])
        reward = None if fate.random() < 0.15 else s.reward
        if fate.random() < 0.9:
            out.append(replace(s, reward=reward, truncated=bool(fate.random() < 0.3)))
    return [out[i] for i in draw.permutation(len(out))]


@given(
    knobs=KNOBS, seed=st.integers(0, 10**6), oldest=st.sampled_from([None, 0, 1]), spread=st.sampled_from([0.1, 0.8])
)
@settings(max_examples=300, deadline=None)
def test_any_knobs_give_the_loss_and_the_gradient_of_their_documents(
    knobs: dict[str, Any], seed: int, oldest: int | None, spread: float
) -> None:
    rule = knobs.pop("rejection", None)
    try:
        k = Knobs(**knobs, rejection=None if rule is None else Rejection(**rule))
    except BadConfiguration:
        assume(False)
    algorithm = PolicyGradient(k)
    samples = odd_samples(seed)
    scores = draw_scores(samples)
    chosen = algorithm.accept(samples)
    assume(chosen)
    packed = weighed(algorithm, chosen, oldest, scores)
    logp = current(packed, spread=spread).requires_grad_()
    entropy = current(packed, seed=3).abs().requires_grad_()
    loss, _ = algorithm.loss(logp, entropy, packed)
    loss = loss / algorithm.count(packed)
    theirs_logp, theirs_entropy = (x.detach().clone().requires_grad_() for x in (logp, entropy))
    reading = Reading(k, samples, oldest, scores)
    expected = reading.loss(by_sample(packed, theirs_logp), by_sample(packed, theirs_entropy))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=3e-5, abs=3e-6)
    if not expected.requires_grad:
        return
    ours = torch.autograd.grad(loss, (logp, entropy), allow_unused=True)
    theirs = torch.autograd.grad(expected, (theirs_logp, theirs_entropy), allow_unused=True)
    for one, other in zip(ours, theirs, strict=True):
        a, b = (torch.zeros_like(logp) if x is None else x for x in (one, other))
        torch.testing.assert_close(a, b, rtol=5e-5, atol=5e-7)
