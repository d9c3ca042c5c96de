"""DPO, IPO and the reward model: pairs of replies."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.trainers.algorithms.dpo import Dpo
from millrace.trainers.algorithms.pairs import pair_weights
from millrace.trainers.algorithms.reward_model import RewardModel, bradley_terry
from millrace.trainers.batches.packing import KEEP, REFERENCE, SIDE, cut, pack
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration
from tests.support.samples import random_samples
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


@pytest.mark.parametrize("kind", [Dpo(), Dpo(loss_type="ipo")])
def test_finite_differences(kind: Dpo) -> None:
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


@given(st.integers(0, 1000), st.integers(1, 200), st.randoms())
def test_pairs_are_never_split_and_order_does_not_matter(seed: int, budget: int, draw: random.Random) -> None:
    samples = pairs(seed)
    scores = draw_scores(samples)
    kind = Dpo()
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
