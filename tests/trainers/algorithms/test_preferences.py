"""DPO, IPO, SimPO, ORPO and the reward model: pairs of replies. KTO: replies that are each good or bad."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.trainers.algorithms.base import TokenAlgorithm
from millrace.trainers.algorithms.dpo import Dpo
from millrace.trainers.algorithms.kto import BASELINE, Kto, mismatches
from millrace.trainers.algorithms.orpo import Orpo, log_odds
from millrace.trainers.algorithms.pairs import pair_weights
from millrace.trainers.algorithms.reward_model import RewardModel, bradley_terry
from millrace.trainers.algorithms.simpo import Simpo
from millrace.trainers.batches.packing import KEEP, PROXIMAL, REFERENCE, SIDE, cut, pack
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration
from tests.support.samples import random_samples
from tests.trainers.algorithms.played import together
from tests.trainers.algorithms.weighing import by_sample, current, draw_scores, weighed


def pairs(seed: int, groups: int = 5) -> list[Sample]:
    """One lineage each, chosen and rejected in random order; equal rewards in group 1."""
    draw = random.Random(seed)
    made = []
    for sample in random_samples(seed, groups=groups, group_size=2):
        if sample.lineage == 0:
            first = sample.trajectory.endswith(".0")
            made.append(replace(sample, reward=float(first if sample.seq != 1 else 1.0)))
    draw.shuffle(made)
    return made


def halves(samples: list[Sample]) -> list[tuple[Sample, Sample]]:
    chosen = {s.seq: s for s in samples if s.reward == 1.0 and s.seq != 1}
    rejected = {s.seq: s for s in samples if s.reward == 0.0}
    return [(chosen[seq], rejected[seq]) for seq in sorted(chosen)]


@pytest.mark.parametrize("kind", [Dpo(), Dpo(beta=0.5), Dpo(loss_type="ipo")])
@pytest.mark.parametrize("seed", range(3))
def test_against_trl_s_form(kind: Dpo, seed: int) -> None:
    samples = pairs(seed)
    scores = draw_scores(samples)
    batch = weighed(kind, samples, scores=scores)
    logp = current(batch)
    loss, sums = kind.loss(logp, torch.zeros_like(logp), batch)
    ours = {s: float(x.sum()) for s, x in by_sample(batch, logp).items()}
    theirs = {s: float(scores[REFERENCE][s].astype("float64").sum()) for s in samples}
    losses, margins = [], []
    for chosen, rejected in halves(samples):
        c, r = ours[chosen] - theirs[chosen], ours[rejected] - theirs[rejected]
        if kind.loss_type == "ipo":
            c, r = c / chosen.trainable, r / rejected.trainable
            losses.append((c - r - 1 / (2 * kind.beta)) ** 2)
        else:
            losses.append(-math.log(1 / (1 + math.exp(-kind.beta * (c - r)))))
        margins.append(kind.beta * (c - r))
    assert kind.count(batch) == len(losses) == 4, "equal rewards are no pair, and nothing counts it"
    assert float(loss) / kind.count(batch) == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert float(sums["reward_margin"]) == pytest.approx(sum(margins), rel=1e-5, abs=1e-6)
    assert float(sums["reward_accuracy"]) == sum(m > 0 for m in margins)
    assert tuple(sums) == kind.measures


@pytest.mark.parametrize("kind", [Simpo(), Simpo(beta=0.7, gamma=0.0), Orpo(), Orpo(beta=2.0)], ids=repr)
@pytest.mark.parametrize("seed", range(3))
def test_simpo_and_orpo_against_their_papers(kind: Simpo | Orpo, seed: int) -> None:
    """Equation 6 of SimPO, equations 3 to 7 of ORPO, in numpy and a pair at a time."""
    samples = pairs(seed)
    batch = weighed(kind, samples)
    logp = current(batch)
    loss, sums = kind.loss(logp, torch.zeros_like(logp), batch)
    mean = {s: float(np.mean(x.numpy())) for s, x in by_sample(batch, logp).items()}
    losses = []
    for chosen, rejected in halves(samples):
        win, lose = mean[chosen], mean[rejected]
        if isinstance(kind, Simpo):
            losses.append(np.log1p(np.exp(-(kind.beta * win - kind.beta * lose - kind.gamma))))
        else:
            odds = [np.exp(h) / (1 - np.exp(h)) for h in (win, lose)]
            losses.append(-win + kind.beta * np.log1p(np.exp(-np.log(odds[0] / odds[1]))))
    assert kind.count(batch) == len(losses) == 4
    assert float(loss) == pytest.approx(sum(losses), rel=1e-9)
    margins = [kind.beta * (mean[c] - mean[r]) for c, r in halves(samples)]
    assert float(sums["reward_margin"]) == pytest.approx(sum(margins), rel=1e-9)
    assert float(sums["reward_accuracy"]) == sum(m > 0 for m in margins)
    assert tuple(sums) == kind.measures


def test_a_reply_that_is_sure_has_finite_odds() -> None:
    h = torch.tensor([0.0, -1e-9, -1e-3, -700.0], dtype=torch.float64, requires_grad=True)
    odds = log_odds(h)
    odds.sum().backward()
    assert torch.isfinite(odds).all()
    assert h.grad is not None
    assert torch.isfinite(h.grad).all()
    assert odds[2].item() == pytest.approx(math.log(math.exp(-1e-3) / (1 - math.exp(-1e-3))))


def rated(seed: int) -> list[Sample]:
    """Good and bad replies, and as many of a prompt and the reply to another one."""
    samples = [replace(s, reward=float(s.trajectory[-1] != "0")) for s in random_samples(seed, groups=4, group_size=3)]
    others = mismatches(samples, 256)
    return [*samples, *(replace(s, trajectory=f"{s.seq}.{100 + at}") for at, s in enumerate(others))]


KTOS = [Kto(), Kto(beta=0.7, desirable_weight=1.5, undesirable_weight=0.5)]


@pytest.mark.parametrize("kind", KTOS, ids=repr)
@pytest.mark.parametrize(("seed", "above"), [(0, 0.05), (1, 0.05), (2, -0.05)])
def test_kto_against_its_paper(kind: Kto, seed: int, above: float) -> None:
    """Equations 7 and 8, in numpy and a reply at a time; the KL is 0 where its estimate is below."""
    samples = rated(seed)
    scores = dict(draw_scores(samples, seed))
    scores[PROXIMAL] = {s: (row + above).astype(np.float32) for s, row in scores[REFERENCE].items()}
    batch = weighed(kind, samples, scores=scores)
    logp = current(batch)
    loss, sums = kind.loss(logp, torch.zeros_like(logp), batch)
    r = {s: float(np.sum(x.numpy() - scores[REFERENCE][s])) for s, x in by_sample(batch, logp).items()}
    estimates = [np.sum(scores[PROXIMAL][s] - scores[REFERENCE][s]) for s in samples if s.is_mismatch]
    z = max(0.0, float(np.mean(estimates)))
    assert (z > 0) == (above > 0)
    losses, margins = [], []
    for s in samples:
        if s.reward is None:
            continue
        if s.reward == 1.0:
            margins.append(kind.beta * (r[s] - z))
            weight = kind.desirable_weight
        else:
            margins.append(kind.beta * (z - r[s]))
            weight = kind.undesirable_weight
        losses.append(weight - weight / (1 + np.exp(-margins[-1])))
    assert kind.count(batch) == len(losses) == len(samples) / 2
    assert float(loss) == pytest.approx(sum(losses), rel=1e-6)
    assert float(sums["reward_margin"]) == pytest.approx(sum(margins), rel=1e-5)
    assert float(sums["reward_accuracy"]) == sum(m > 0 for m in margins)
    assert float(sums["reference_kl"]) == pytest.approx(z * len(losses), rel=1e-6)
    assert tuple(sums) == kind.measures


def test_mismatches_have_the_prompt_of_one_and_the_reply_of_another() -> None:
    samples = [s for s in random_samples(0, groups=3, group_size=1) if s.lineage == 0]
    made = mismatches(samples, 9)
    assert mismatches(samples[:1], 9) == []
    for sample, other, joined in zip(samples, [*samples[1:], samples[0]], made, strict=True):
        begin, end = int(np.argmax(sample.mask)), int(np.argmax(other.mask))
        assert joined.tokens.tolist() == [*sample.tokens[:begin], *other.tokens[end:]][:9]
        assert joined.mask.tolist() == [*sample.mask[:begin], *other.mask[end:]][:9]
        assert (joined.reward, joined.seq, joined.group) == (None, sample.seq, sample.group)
        assert joined.is_mismatch


def test_a_reply_whose_reward_is_missing_says_nothing_of_the_baseline() -> None:
    """A policy's batch has no mismatches, and may have replies that nobody judged."""
    samples = [replace(s, reward=None if s.seq == 0 else 1.0) for s in random_samples(0, groups=3)]
    scores = dict(draw_scores(samples))
    scores[PROXIMAL] = {s: (row + 0.5).astype(np.float32) for s, row in scores[REFERENCE].items()}
    weights = Kto().weigh(samples, None, scores)
    assert all((columns[BASELINE] == 0).all() for columns in weights.values())
    assert all((weights[s][KEEP] == 0).all() for s in samples if s.reward is None)


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 200), st.randoms(), st.integers(1, 3))
def test_kto_is_the_same_however_it_is_cut(seed: int, budget: int, draw: random.Random, world: int) -> None:
    kind, samples = Kto(), rated(seed)
    scores = draw_scores(samples, seed)
    whole = weighed(kind, samples, scores=scores)
    expected = kind.loss(current(whole), torch.zeros(whole.trainable), whole)[0]
    draw.shuffle(samples)
    parts = [[s for s in samples if s.seq % world == rank] for rank in range(world)]
    ranks = [lambda reduce, part=part: kind.weigh(part, None, scores, reduce) for part in parts]
    total, count = 0.0, 0.0
    for part, weights in zip(parts, together(ranks), strict=True):
        for micro in cut(part, budget, unite=kind.whole):
            batch = pack(micro).attach_samples(weights)
            doubled = {name: column.double() for name, column in batch.columns.items()}
            batch = replace(batch, behaviour=batch.behaviour.double(), columns=doubled)
            total += float(kind.loss(current(batch), torch.zeros(batch.trainable), batch)[0])
            count += kind.count(batch)
    assert total == pytest.approx(float(expected), rel=1e-5)
    assert count == kind.count(whole)


@pytest.mark.parametrize("kind", [Dpo(), Dpo(loss_type="ipo"), Simpo(), Orpo(), Kto()])
def test_finite_differences(kind: TokenAlgorithm) -> None:
    batch = weighed(kind, pairs(0, groups=3))
    logp = current(batch).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kind.loss(x, torch.zeros_like(x), batch)[0], (logp,))


def test_the_reward_model_learns_differences() -> None:
    samples = pairs(0)
    batch = weighed(RewardModel(), samples)
    scores = torch.randn(batch.samples, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    at = {s: float(scores[i]) for i, s in enumerate(batch.members)}
    loss, sums = bradley_terry(scores, batch)
    expected = [math.log(1 + math.exp(at[r] - at[c])) for c, r in halves(samples)]
    assert float(loss) == pytest.approx(sum(expected))
    assert RewardModel().count(batch) == 4
    assert float(sums["correct"]) == sum(at[c] > at[r] for c, r in halves(samples))
    assert tuple(sums) == RewardModel().measures
    assert torch.autograd.gradcheck(lambda x: bradley_terry(x, batch)[0], (scores.requires_grad_(),))


@given(st.integers(0, 1000), st.integers(1, 200), st.randoms(), st.sampled_from([Dpo(), Simpo(), Orpo()]))
def test_pairs_are_never_split_and_order_does_not_matter(
    seed: int, budget: int, draw: random.Random, kind: TokenAlgorithm
) -> None:
    samples = pairs(seed)
    scores = draw_scores(samples)
    whole = weighed(kind, samples, scores=scores)
    expected = kind.loss(current(whole), torch.zeros(whole.trainable), whole)[0]
    draw.shuffle(samples)
    total, count = 0.0, 0.0
    for micro in cut(samples, budget, unite=kind.whole):
        batch = weighed(kind, micro, scores=scores)
        total += float(kind.loss(current(batch), torch.zeros(batch.trainable), batch)[0])
        count += kind.count(batch)
    assert total == pytest.approx(float(expected), rel=1e-9)
    assert count == kind.count(whole)


def no_reward(samples: list[Sample]) -> list[Sample]:
    return [replace(s, reward=None) if s.trajectory == "0.0" else s for s in samples]


def all_masked(samples: list[Sample]) -> list[Sample]:
    return [replace(s, mask=s.mask * 0) if s.trajectory == "0.0" else s for s in samples]


def alone(samples: list[Sample]) -> list[Sample]:
    return [s for s in samples if s.trajectory != "0.0"]


@pytest.mark.parametrize("spoil", [no_reward, all_masked, alone])
def test_half_a_pair_is_no_pair(spoil: Callable[[list[Sample]], list[Sample]]) -> None:
    samples = spoil([s for s in pairs(0) if s.seq == 0])
    weights = pair_weights(samples, None)
    assert not any(columns[SIDE].any() or columns[KEEP].any() for columns in weights.values())
    batch = pack([s for s in samples if s.trainable]).attach_samples(weights)
    loss, _ = bradley_terry(torch.ones(batch.samples), batch)
    assert float(loss) == 0
    assert RewardModel().count(batch) == 0


def test_more_than_two_replies_are_refused() -> None:
    with pytest.raises(BadConfiguration, match="give each pair a group"):
        pair_weights(random_samples(0, groups=1, group_size=3), None)


def test_without_a_reference_there_is_no_preference() -> None:
    with pytest.raises(BadConfiguration, match="score the batch with it"):
        Dpo().weigh(pairs(0), None)
    with pytest.raises(BadConfiguration, match="score the batch by it"):
        Kto().weigh(pairs(0), None)


@pytest.mark.parametrize("kind", [Dpo(), Simpo(), Orpo(), Kto()], ids=lambda kind: kind.name)
def test_masked_tokens_may_hold_anything(kind: TokenAlgorithm) -> None:
    batch = weighed(kind, random_samples(1, group_size=2, version=2), oldest=1)
    assert not batch.keep.all()
    logp = current(batch)
    clean, _ = kind.loss(logp, torch.zeros_like(logp), batch)
    spoiled = torch.where(batch.keep > 0, logp, torch.nan).requires_grad_()
    dirty, sums = kind.loss(spoiled, torch.zeros_like(logp), batch)
    (gradient,) = torch.autograd.grad(dirty, spoiled)
    assert float(dirty.detach()) == pytest.approx(float(clean), rel=1e-12)
    assert torch.isfinite(gradient).all()
    assert not gradient[batch.keep == 0].any()
    assert all(torch.isfinite(value) for value in sums.values())
    assert tuple(kind.loss(torch.zeros(0), torch.zeros(0), pack([]))[1]) == kind.measures
