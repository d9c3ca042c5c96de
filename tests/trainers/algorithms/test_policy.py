"""The policy-gradient family as compositions: what pulls, what is counted, and that cuts never matter."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.trainers.algorithms.awr import Awr
from millrace.trainers.algorithms.base import TokenAlgorithm
from millrace.trainers.algorithms.policy import PolicyGradient
from millrace.trainers.algorithms.presets import PRESETS
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.algorithms.sft import Sft
from millrace.trainers.batches.packing import ADVANTAGES, KEEP, PROXIMAL, MicroBatch, cut, pack
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration
from tests.support.samples import random_samples
from tests.trainers.algorithms.played import together
from tests.trainers.algorithms.weighing import current, draw_scores, weighed

VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"preset": name} for name in PRESETS},
    "sequence mean": {"preset": "grpo", "aggregation": "sequence"},
    "constant": {"preset": "drgrpo", "aggregation": "constant", "max_new_tokens": 24},
    "kl in the loss": {"preset": "grpo", "kl_loss_coef": 0.1, "kl_estimator": "k3"},
    "dual clip": {"preset": "dapo", "dual_clip": 1.5, "max_new_tokens": 10, "overlong_tokens": 6},
    "turns": {"preset": "ppo", "gae_unit": "turn", "discount": 0.9, "gae_lambda": 0.8},
    "lambda by length": {"preset": "ppo", "gae_lambda_by": "length", "gae_lambda": 0.1},
    "sample masks": {"preset": "decoupled", "rejection": {"level": "sequence", "upper": 1.1, "lower": 0.9}},
    "linear": {"preset": "decoupled", "proximal": "linear", "proximal_lag": 1},
    "compared": {"preset": "decoupled", "proximal": "metrics"},
    "decoupled gmpo": {"preset": "gmpo", "decoupled": True, "rejection": {"level": "sequence", "weights": "token"}},
    "entropy bonus": {"preset": "grpo", "entropy_coef": 0.1},
    "teacher alone": {"preset": "distill-on-policy", "rl_coef": 0.0},
    "recomputed": {"preset": "gspo", "recompute": True, "mask_truncated": True},
}


def variant(name: str) -> PolicyGradient:
    knobs = dict(VARIANTS[name])
    return policy(knobs.pop("preset"), **knobs)


KINDS: list[TokenAlgorithm] = [*(variant(name) for name in VARIANTS), Sft(), Awr()]
each = pytest.mark.parametrize("kind", KINDS, ids=[*VARIANTS, "sft", "awr"])


@each
def test_every_declared_measure_is_summed_also_for_nothing(kind: TokenAlgorithm) -> None:
    for batch in (weighed(kind, random_samples(0)), pack([])):
        logprobs = current(batch)
        loss, sums = kind.loss(logprobs, torch.zeros_like(logprobs), batch)
        assert loss.ndim == 0
        assert tuple(sums) == kind.measures
        assert all(torch.isfinite(value) for value in (loss, *sums.values()))


def differentiable(kind: TokenAlgorithm) -> bool:
    """A loss with a stopped gradient has none that differences could find; `test_oracles` checks those."""
    if not isinstance(kind, PolicyGradient):
        return True
    k = kind.knobs
    return k.objective != "cispo" and k.teacher_coef == 0 and (k.needs_proximal or not k.decoupled)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if differentiable(kind)], ids=repr)
def test_finite_differences_of_the_whole_loss(kind: TokenAlgorithm) -> None:
    batch = weighed(kind, random_samples(9, groups=2, group_size=3), oldest=-1)
    logprobs = current(batch).requires_grad_()
    entropy = torch.zeros_like(batch.behaviour)
    assert torch.autograd.gradcheck(lambda x: kind.loss(x, entropy, batch)[0], (logprobs,))


@each
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 150), draw=st.randoms(), world=st.integers(1, 3))
def test_the_result_never_depends_on_the_cut(
    kind: TokenAlgorithm, seed: int, budget: int, draw: random.Random, world: int
) -> None:
    """Order, micro-batches and ranks: sums and denominators of the parts are those of the whole."""
    samples = random_samples(seed, groups=4, group_size=3, version=1)
    scores = draw_scores(samples)
    whole = weighed(kind, kind.accept(samples), oldest=0, scores=scores)
    logp = dict(zip(whole.members, torch.split(current(whole), [m.trainable for m in whole.members]), strict=True))
    expected, expected_sums = kind.loss(current(whole), torch.zeros(whole.trainable), whole)

    shuffled = list(samples)
    draw.shuffle(shuffled)
    parts = [[s for s in shuffled if s.seq % world == rank] for rank in range(world)]
    total, count, sums = 0.0, 0.0, dict.fromkeys(kind.measures, 0.0)
    ranks = [lambda reduce, part=part: kind.weigh(kind.accept(part), 0, scores, reduce) for part in parts]
    for rank, weights in enumerate(together(ranks)):
        for micro in cut(kind.accept(parts[rank]), budget, unite=kind.whole):
            batch = doubled(pack(micro).attach_samples(weights))
            mine = torch.cat([logp[member] for member in batch.members])
            loss, measured = kind.loss(mine, torch.zeros_like(mine), batch)
            total, count = total + float(loss), count + kind.count(batch)
            sums = {name: value + float(measured[name]) for name, value in sums.items()}
    assert count == pytest.approx(kind.count(whole))
    assert total == pytest.approx(float(expected), rel=1e-4, abs=1e-5)
    for name, value in sums.items():
        assert value == pytest.approx(float(expected_sums[name]), rel=1e-5, abs=1e-5), name


def doubled(batch: MicroBatch) -> MicroBatch:
    columns = {name: column.double() for name, column in batch.columns.items()}
    return replace(batch, behaviour=batch.behaviour.double(), columns=columns, v_prox=1.0, v_theta=1.5)


@each
def test_masked_tokens_may_hold_anything(kind: TokenAlgorithm) -> None:
    batch = weighed(kind, random_samples(1, version=5), oldest=5)
    logprobs = current(batch)
    clean, _ = kind.loss(logprobs, torch.zeros_like(logprobs), batch)
    dirty, sums = kind.loss(torch.where(batch.keep > 0, logprobs, torch.nan), torch.zeros_like(logprobs), batch)
    assert float(dirty) == pytest.approx(float(clean), rel=1e-12)
    assert all(torch.isfinite(value) for value in sums.values())


@each
def test_what_is_masked_leaves_no_trace_in_the_gradient(kind: TokenAlgorithm) -> None:
    """Ratios of masked tokens may be beyond any float."""
    batch = weighed(kind, random_samples(1, version=5), oldest=5)
    far = replace(batch, behaviour=torch.where(batch.keep > 0, batch.behaviour, -5000.0))
    logprobs = current(batch).requires_grad_()
    loss, sums = kind.loss(logprobs, torch.zeros_like(batch.behaviour), far)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert torch.isfinite(gradient).all()
    assert not gradient[batch.keep == 0].any()
    assert all(torch.isfinite(value) for value in sums.values())


def test_what_is_rejected_leaves_no_trace_in_the_gradient() -> None:
    kind = policy("icepop")
    batch = weighed(kind, random_samples(1))
    behaviour = batch.behaviour.clone()
    behaviour[3] = -5000.0
    logprobs = current(batch).requires_grad_()
    loss, _ = kind.loss(logprobs, torch.zeros_like(behaviour), replace(batch, behaviour=behaviour))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert torch.isfinite(gradient).all()
    assert gradient[3] == 0


@each
def test_old_tokens_do_not_pull_and_are_still_counted(kind: TokenAlgorithm) -> None:
    samples = kind.accept(random_samples(1, version=5))
    every, fresh = (weighed(kind, samples, oldest) for oldest in (None, 5))
    assert kind.count(fresh) == kind.count(every)
    assert not fresh.keep[fresh.versions < 5].any()
    logprobs = current(fresh, spread=0.01).requires_grad_()
    kind.loss(logprobs, torch.zeros(fresh.trainable), fresh)[0].backward()
    assert logprobs.grad is not None
    assert not logprobs.grad[fresh.versions < 5].any()
    assert logprobs.grad[fresh.versions >= 5].any()


@pytest.mark.parametrize("name", PRESETS)
def test_a_trajectory_without_reward_takes_no_part(name: str) -> None:
    kind = policy(name)
    samples = random_samples(2, groups=2, group_size=4)
    silent = [replace(s, reward=None) if s.trajectory == "0.1" else s for s in samples]
    spoken = [s for s in silent if s.reward is not None]
    scores = draw_scores(silent)
    everyone, others = kind.weigh(silent, None, scores), kind.weigh(spoken, None, scores)
    for sample in silent:
        if sample.reward is None:
            assert not everyone[sample][KEEP].any()
            assert sample.trainable > 0
        else:
            np.testing.assert_array_equal(everyone[sample][ADVANTAGES], others[sample][ADVANTAGES])


def test_lineages_share_the_advantage_of_their_trajectory() -> None:
    samples = random_samples(3)
    weights = policy("grpo").weigh(samples, None)
    seen: dict[str, set[float]] = {}
    for sample in samples:
        seen.setdefault(sample.trajectory, set()).update(weights[sample][ADVANTAGES].tolist())
    assert all(len(values) == 1 for values in seen.values())
    assert any(s.lineage for s in samples)


def test_the_overlong_penalty_is_that_of_the_longest_reply() -> None:
    """Three turns of 400 tokens under a limit of 512 are a penalty of one reply, and no reply costs more than 1."""
    knobs = {"kl_coef": 0.0, "advantage_norm": "none", "max_new_tokens": 512, "overlong_tokens": 128}
    for turns, penalty in (([400] * 3, -0.125), ([100, 384], 0.0), ([448, 10], -0.5), ([512], -1.0), ([2000, 5], -1.0)):
        mask = np.array([bit for length in turns for bit in (0, *[1] * length)], np.uint8)
        tokens, versions = np.zeros(len(mask), np.int32), np.zeros(len(mask), np.int32)
        sample = Sample(tokens, mask, np.zeros(len(mask), np.float32), versions, 1.0, 0, "g", "t")
        short = replace(sample, tokens=tokens[:9], mask=mask[:9], logprobs=sample.logprobs[:9], versions=versions[:9])
        weights = policy("reinforce++", **knobs).weigh([sample, replace(short, lineage=1)], None)
        for columns in weights.values():
            assert set(columns[ADVANTAGES].tolist()) == {1.0 + penalty}


def test_dynamic_sampling_leaves_out_what_teaches_nothing() -> None:
    samples = random_samples(0, groups=4)
    equal = [replace(s, reward=1.0) if s.seq in (1, 2) else s for s in samples]
    assert {s.seq for s in policy("dapo").accept(equal)} == {0, 3}
    assert {s.seq for s in policy("grpo").accept(equal)} == {0, 1, 2, 3}


def test_the_entropy_bonus_takes_each_entropy_off_the_loss() -> None:
    samples = random_samples(0, version=1)
    plain, bonus = policy("grpo"), policy("grpo", entropy_coef=0.3)
    assert (plain.entropy_learns, bonus.entropy_learns, bonus.pulls) == (False, True, False)
    batch = weighed(bonus, samples, oldest=0)
    logp = current(batch)
    entropy = torch.rand(batch.trainable, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    entropy = torch.where(batch.keep > 0, entropy, torch.inf).requires_grad_()
    loss, _ = bonus.loss(logp, entropy, batch)
    without, _ = plain.loss(logp, entropy.detach(), batch)
    kept = entropy.detach()[batch.keep > 0]
    assert float(loss.detach()) == pytest.approx(float(without) - 0.3 * float(kept.sum()), rel=1e-9)
    (gradient,) = torch.autograd.grad(loss, entropy)
    torch.testing.assert_close(gradient, -0.3 * batch.keep)


def test_missing_scores_are_refused() -> None:
    samples = random_samples(0)
    for name, missing in (("ppo", "values"), ("reinforce++", "reference"), ("m2po", "proximal")):
        with pytest.raises(BadConfiguration, match=f"needs the {missing}"):
            policy(name).weigh(samples, None, {})
    batch = pack(samples).attach_samples(policy("decoupled").weigh(samples, None))
    with pytest.raises(BadConfiguration, match="proximal is not attached"):
        policy("decoupled").loss(current(batch), torch.zeros(batch.trainable), batch)


def test_what_is_scored_is_what_is_needed() -> None:
    assert policy("grpo").needs == ()
    assert policy("decoupled").needs == (PROXIMAL,)
    assert policy("decoupled-loglinear").needs == ()
    assert policy("gspo", recompute=True).needs == (PROXIMAL,)
    assert policy("ppo", kl_coef=0.1).needs == ("reference", "values")
    assert policy("distill-on-policy").holds == ("teacher",)


def test_versions_that_approximate_are_the_caller_s() -> None:
    """One version of lag is the convention that counts the current policy as the engine's version."""
    batch = weighed(policy("decoupled-loglinear"), random_samples(0, version=1))
    logp = current(batch)
    here, lagging = (policy("decoupled-loglinear", proximal_lag=lag)._old_logprobs(logp, batch) for lag in (0, 1))
    at = batch.versions == 0
    share = 1 / 1.5
    torch.testing.assert_close(here[at], (batch.behaviour + share * (logp - batch.behaviour))[at])
    torch.testing.assert_close(lagging[at], batch.behaviour[at])
