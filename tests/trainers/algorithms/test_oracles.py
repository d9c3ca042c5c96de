"""Every policy-gradient algorithm against its published form, written out over padded rows [B, S].

What is written here follows the papers and the forms of TRL and verl, and shares no code with what it checks: rows are
padded and rolled, loops are plain, each trajectory has one lineage.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from millrace.trainers.algorithms.policy import PolicyGradient
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.batches.packing import PROXIMAL, REFERENCE, TEACHER, VALUES
from millrace.trainers.batches.sample import Sample
from tests.support.samples import random_samples
from tests.trainers.algorithms.weighing import Padded, by_sample, current, draw_scores, padded, weighed

T = torch.Tensor
Oracle = Callable[[Padded, T], T]


def group_stats(p: Padded, loo: bool = False) -> tuple[T, T]:
    """Mean and unbiased std of each row's group."""
    mean, std = torch.zeros_like(p.reward), torch.ones_like(p.reward)
    for row, name in enumerate(p.group):
        rows = [i for i, other in enumerate(p.group) if other == name]
        values = p.reward[rows]
        mean[row] = (values.sum() - p.reward[row]) / (len(rows) - 1) if loo else values.mean()
        std[row] = values.std(unbiased=True)
    return mean, std


def whiten(grid: T, mask: T) -> T:
    """Over the batch's tokens, unbiased."""
    values = grid[mask > 0]
    return (grid - values.mean()) / (values.std(unbiased=True) + 1e-5) * mask


def grpo_rewards(p: Padded, eps: float = 1e-5) -> T:
    mean, std = group_stats(p)
    return (p.reward - mean) / (std + eps)


def grpo_advantages(p: Padded) -> T:
    return whiten(grpo_rewards(p)[:, None] * p.mask, p.mask)


def ppo_clip(ratio: T, advantages: T, low: float, high: float) -> T:
    return -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def token_mean(losses: T, p: Padded) -> T:
    return (losses * p.mask).sum() / p.n


def grpo(p: Padded, logp: T) -> T:
    """TRL's GRPO with loss_type bnpo and no KL."""
    advantages = grpo_rewards(p, 1e-4)[:, None]
    return token_mean(ppo_clip(torch.exp(logp - p.behaviour), advantages, 0.2, 0.28), p)


def drgrpo(p: Padded, logp: T) -> T:
    advantages = (p.reward - group_stats(p)[0])[:, None]
    return token_mean(ppo_clip(torch.exp(logp - p.behaviour), advantages, 0.2, 0.2), p)


def rloo(p: Padded, logp: T) -> T:
    mean, _ = group_stats(p, loo=True)
    advantages = whiten((p.reward - mean)[:, None] * p.mask, p.mask)
    return token_mean(ppo_clip(torch.exp(logp - p.behaviour), advantages, 0.2, 0.2), p)


def reward_to_go(p: Padded, rewards: T, kl: T) -> T:
    """Each token: minus 0.001 of the KL to go, plus the outcome."""
    out = torch.zeros_like(kl)
    for row in range(len(rewards)):
        total = rewards[row]
        for t in reversed(range(kl.shape[1])):
            if p.mask[row, t]:
                total = total - 0.001 * kl[row, t]
                out[row, t] = total
    return out


def reinforce(p: Padded, logp: T) -> T:
    kl = (p.behaviour - p.columns[REFERENCE]).clamp(-10, 10)
    advantages = whiten(reward_to_go(p, p.reward, kl), p.mask)
    return token_mean(ppo_clip(torch.exp(logp - p.behaviour), advantages, 0.2, 0.2), p)


def reinforce_baseline(p: Padded, logp: T) -> T:
    kl = ((p.behaviour - p.columns[REFERENCE]) ** 2 / 2).clamp(-10, 10)
    advantages = whiten(reward_to_go(p, p.reward - group_stats(p)[0], kl), p.mask)
    return token_mean(ppo_clip(torch.exp(logp - p.behaviour), advantages, 0.2, 0.2), p)


def liteppo(p: Padded, logp: T) -> T:
    rewards = (p.reward - group_stats(p)[0]) / (p.reward.std(unbiased=True) + 1e-5)
    advantages = whiten(rewards[:, None] * p.mask, p.mask)
    return token_mean(ppo_clip(torch.exp(logp - p.behaviour), advantages, 0.2, 0.2), p)


def dapo(p: Padded, logp: T) -> T:
    """Groups that teach nothing are gone before anything is counted; no reply comes near the limit of 4096."""
    return token_mean(ppo_clip(torch.exp(logp - p.behaviour), grpo_advantages(p), 0.2, 0.28), p)


def gspo(p: Padded, logp: T) -> T:
    """TRL's importance_sampling_level sequence."""
    lengths = p.mask.sum(1)
    ratio = torch.exp(((logp - p.behaviour) * p.mask).sum(1) / lengths)
    advantages = (grpo_advantages(p) * p.mask).sum(1) / lengths
    return token_mean(ppo_clip(ratio, advantages, 0.4, 0.4)[:, None], p)


def sapo(p: Padded, logp: T) -> T:
    advantages, ratio = grpo_advantages(p), torch.exp(logp - p.behaviour)
    tau = torch.where(advantages > 0, 1.0, 1.05)
    return token_mean(-4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantages, p)


def cispo(p: Padded, logp: T) -> T:
    """TRL's loss_type cispo, bounded to [0, 5]."""
    weight = torch.exp(logp - p.behaviour).clamp(0.0, 5.0).detach()
    return token_mean(-weight * grpo_advantages(p) * logp, p)


def gmpo(p: Padded, logp: T) -> T:
    """The pseudo-code of the paper, a sample at a time; clipped to (e^-0.4, e^0.4)."""
    advantages, losses = grpo_rewards(p), []
    for row in range(len(p.reward)):
        at = p.mask[row] > 0
        sign = 1.0 if advantages[row] > 0 else -1.0
        signed = sign * (logp[row] - p.behaviour[row])[at]
        least = torch.min(signed, signed.clamp(-0.4, 0.4))
        losses.append(-advantages[row] * torch.exp((sign * least).sum() / at.sum()))
    return torch.stack(losses).mean()


def m2po(p: Padded, logp: T) -> T:
    squares = ((p.behaviour - p.columns[PROXIMAL]) ** 2)[p.mask > 0].sort(descending=True).values
    dropped = next(i for i in range(len(squares)) if squares[i:].mean() < 0.04)
    stays = ((p.behaviour - p.columns[PROXIMAL]) ** 2 <= squares[dropped]) * p.mask
    losses = ppo_clip(torch.exp(logp - p.columns[PROXIMAL]), grpo_advantages(p), 0.2, 0.28)
    return (torch.exp(p.columns[PROXIMAL] - p.behaviour) * losses * stays).sum() / p.n


def off_policy(repaired: Callable[[T, Padded], T], rewards: Callable[[Padded], T]) -> Oracle:
    def oracle(p: Padded, logp: T) -> T:
        losses = ppo_clip(torch.exp(logp - p.columns[PROXIMAL]), rewards(p), 0.2, 0.28)
        return token_mean(repaired(torch.exp(p.columns[PROXIMAL] - p.behaviour), p) * losses, p)

    return oracle


def icepop_weight(weight: T, p: Padded) -> T:
    return torch.where((weight >= 0.5) & (weight <= 5), weight, 0.0)


def kpop_weight(weight: T, p: Padded) -> T:
    a, b = (torch.exp(x).clamp(1e-8, 1 - 1e-8) for x in (p.columns[PROXIMAL], p.behaviour))
    kls = [x * torch.log(x / y) + (1 - x) * torch.log((1 - x) / (1 - y)) for x, y in ((a, b), (b, a))]
    return torch.where(torch.max(*kls) <= 2, weight, 0.0)


def loglinear(p: Padded, logp: T) -> T:
    """Version 1 trains, half of its steps made: v_prox 1, v_theta 1.5."""
    alpha = torch.where(p.versions < 0, 0.0, ((1.0 - p.versions) / (1.5 - p.versions)).clamp(0, 1))
    prox = (p.behaviour + alpha * (logp - p.behaviour)).detach()
    losses = ppo_clip(torch.exp(logp - prox), grpo_rewards(p, 1e-4)[:, None], 0.2, 0.28)
    return token_mean(torch.exp(prox - p.behaviour).clamp(max=2) * losses, p)


def distilled(p: Padded, logp: T) -> T:
    """The policy gradient with the teacher's surprise as reward, whose value is k1 where the ratio is 1."""
    reward = p.columns[TEACHER] - logp.detach()
    return grpo(p, logp) - 0.005 * token_mean(torch.exp(logp - p.behaviour) * reward, p)


def ppo(p: Padded, logp: T, bootstrap: bool = False) -> T:
    """verl's GAE: masked positions carry the running advantage and the next value through. AReaL's bootstraps."""
    values, advantages = p.columns[VALUES], torch.zeros_like(p.mask)
    for row in range(len(p.reward)):
        ahead = torch.zeros((), dtype=torch.float64)
        following = (
            p.last_value[row] if bootstrap and p.samples[row].truncated else torch.zeros((), dtype=torch.float64)
        )
        last = int(p.mask[row].nonzero().max())
        for t in reversed(range(p.mask.shape[1])):
            if p.mask[row, t]:
                delta = (p.reward[row] if t == last else 0.0) + following - values[row, t]
                ahead, following = delta + ahead, values[row, t]
                advantages[row, t] = ahead
    return token_mean(ppo_clip(torch.exp(logp - p.behaviour), whiten(advantages, p.mask), 0.2, 0.2), p)


ORACLES: dict[str, Oracle] = {
    "grpo": grpo,
    "ppo": ppo,
    "drgrpo": drgrpo,
    "rloo": rloo,
    "reinforce++": reinforce,
    "reinforce++-baseline": reinforce_baseline,
    "liteppo": liteppo,
    "dapo": dapo,
    "gspo": gspo,
    "sapo": sapo,
    "cispo": cispo,
    "gmpo": gmpo,
    "m2po": m2po,
    "decoupled": off_policy(lambda w, p: w.clamp(max=2), lambda p: grpo_rewards(p, 1e-4)[:, None]),
    "decoupled-loglinear": loglinear,
    "tis": off_policy(lambda w, p: w.clamp(max=2), grpo_advantages),
    "icepop": off_policy(icepop_weight, grpo_advantages),
    "kpop": off_policy(kpop_weight, grpo_advantages),
    "distill-on-policy": distilled,
}


def batch(seed: int) -> list[Sample]:
    """One lineage a trajectory, some of them cut off, versions -1 to 1."""
    samples = [s for s in random_samples(seed, groups=3, group_size=5, version=1) if s.lineage == 0]
    cut = [
        Sample(**{n: getattr(s, n) for n in s.__slots__ if n != "truncated"}, truncated=i % 3 == 0)
        for i, s in enumerate(samples)
    ]
    lengths = np.random.default_rng(seed).permutation(len(cut))
    return [cut[i] for i in lengths]


def compare(algorithm: PolicyGradient, samples: list[Sample], oracle: Oracle, spread: float) -> None:
    scores = draw_scores(samples)
    chosen = algorithm.accept(samples)
    packed = weighed(algorithm, chosen, scores=scores)
    logp = current(packed, spread=spread).requires_grad_()
    loss, _ = algorithm.loss(logp, torch.zeros_like(logp), packed)
    (ours,) = torch.autograd.grad(loss / algorithm.count(packed), logp)

    rows = padded(chosen, scores)
    theirs_logp = padded(chosen, scores, logp=by_sample(packed, logp.detach())).columns["logp"].requires_grad_()
    expected = oracle(rows, theirs_logp)
    (theirs,) = torch.autograd.grad(expected, theirs_logp)
    assert float(loss.detach()) / algorithm.count(packed) == pytest.approx(float(expected.detach()), rel=2e-6, abs=5e-7)
    at = {s: row for row, s in enumerate(chosen)}
    for sample, gradient in by_sample(packed, ours).items():
        there = theirs[at[sample], torch.from_numpy(np.flatnonzero(sample.mask)) - 1]
        torch.testing.assert_close(gradient, there, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_the_loss_and_its_gradient_are_the_published_ones(name: str, seed: int, spread: float) -> None:
    compare(policy(name), batch(seed), ORACLES[name], spread)


def test_a_reply_that_was_cut_off_may_be_worth_what_comes_after() -> None:
    samples = batch(0)
    assert any(sample.truncated for sample in samples)
    compare(policy("ppo", bootstrap_truncated=True), samples, partial(ppo, bootstrap=True), 0.3)


def test_every_preset_has_an_oracle() -> None:
    from millrace.trainers.algorithms.presets import PRESETS

    assert ORACLES.keys() == PRESETS.keys()
