"""GRPO and SFT as compositions: what pulls, what is counted, what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.samples import random_samples
from trainers.algorithms.base import Algorithm
from trainers.algorithms.grpo import Grpo
from trainers.algorithms.registry import algorithm
from trainers.algorithms.sft import Sft
from trainers.batches.packing import Packed, pack
from trainers.errors import BadConfiguration


def numbers(batch: Packed, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gap = torch.randn(batch.trainable, generator=generator, dtype=torch.float64) * 0.3
    return batch.behaviour.double() + gap, torch.rand(batch.trainable, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kind", [Grpo(), Grpo(decoupled=True), Sft()])
def test_every_declared_measure_is_summed_also_for_nothing(kind: Algorithm) -> None:
    full = pack(kind.weigh(random_samples(0), None))
    for batch in (full, pack([])):
        logprobs, entropy = numbers(batch)
        loss, sums = kind.loss(logprobs, entropy, batch.with_proximal(logprobs.detach()))
        assert loss.ndim == 0
        assert tuple(sums) == kind.measures


@given(st.integers(0, 1000))
def test_the_loss_is_a_sum_over_samples(seed: int) -> None:
    kind = Grpo()
    weighted = kind.weigh(random_samples(seed), None)
    parts = [kind.loss(*numbers(batch), batch)[0] for batch in (pack([w]) for w in weighted)]
    kept = pack(weighted)
    ordered = sorted(weighted, key=lambda w: (w.sample.length, w.sample.seq, w.sample.trajectory, w.sample.lineage))
    logprobs = torch.cat([numbers(pack([w]))[0] for w in ordered])
    whole, _ = kind.loss(logprobs, torch.zeros_like(logprobs), kept)
    assert float(whole) == pytest.approx(float(sum(parts)), rel=1e-6, abs=1e-6)


def test_grpo_against_the_formula_written_out() -> None:
    samples = random_samples(5, groups=2, group_size=3)
    kind = Grpo(decoupled=True, behaviour_cap=1.5)
    batch = pack(kind.weigh(samples, None))
    logprobs, entropy = numbers(batch)
    proximal, _ = numbers(batch, seed=1)
    loss, sums = kind.loss(logprobs, entropy, batch.with_proximal(proximal))
    expected = 0.0
    rewards = {s.trajectory: s.reward or 0.0 for s in samples}
    groups = {s.trajectory: s.group for s in samples}
    row = 0
    for sample in sorted(samples, key=lambda s: (s.length, s.seq, s.trajectory, s.lineage)):
        peers = [r for t, r in rewards.items() if groups[t] == sample.group]
        advantage = (rewards[sample.trajectory] - np.mean(peers)) / (np.std(peers, ddof=1) + 1e-4)
        for _ in range(sample.trainable):
            new, prox, old = float(logprobs[row]), float(proximal[row]), float(batch.behaviour[row])
            ratio = np.exp(new - prox)
            expected += min(np.exp(prox - old), 1.5) * -min(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
            row += 1
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(sums["kept"]) == row


@pytest.mark.parametrize("kind", [Grpo(), Grpo(decoupled=True), Sft()])
def test_finite_differences_of_the_whole_loss(kind: Algorithm) -> None:
    batch = pack(kind.weigh(random_samples(9, groups=3), oldest=-1))
    logprobs, entropy = numbers(batch)
    batch = replace(batch.with_proximal(numbers(batch, seed=2)[0]), behaviour=batch.behaviour.double())
    assert torch.autograd.gradcheck(lambda x: kind.loss(x, entropy, batch)[0], (logprobs.requires_grad_(),))


def test_old_tokens_do_not_pull_and_are_still_counted() -> None:
    samples = random_samples(1, version=5)
    kind = Grpo()
    every, fresh = (pack(kind.weigh(samples, oldest)) for oldest in (None, 5))
    assert fresh.trainable == every.trainable
    assert fresh.keep.tolist() == (every.versions >= 5).float().tolist()
    logprobs = numbers(fresh)[0].requires_grad_()
    kind.loss(logprobs, torch.zeros(fresh.trainable), fresh)[0].backward()
    assert logprobs.grad is not None
    assert not logprobs.grad[fresh.versions < 5].any()
    assert logprobs.grad[fresh.versions >= 5].any()


def test_masked_tokens_may_hold_anything() -> None:
    samples = random_samples(1, version=5)
    batch = pack(Grpo().weigh(samples, 5))
    logprobs = numbers(batch)[0]
    clean, _ = Grpo().loss(logprobs, torch.zeros_like(logprobs), batch)
    dirty, sums = Grpo().loss(torch.where(batch.keep > 0, logprobs, torch.nan), torch.zeros_like(logprobs), batch)
    assert float(dirty) == float(clean)
    assert all(torch.isfinite(value) for value in sums.values())


def test_a_trajectory_without_reward_takes_no_part() -> None:
    samples = random_samples(2, groups=1, group_size=4)
    silent = [replace(s, reward=None) if s.trajectory == "0.1" else s for s in samples]
    weighted = {w.sample.trajectory: w for w in Grpo().weigh(silent, None)}
    others = {w.sample.trajectory: w for w in Grpo().weigh([s for s in samples if s.trajectory != "0.1"], None)}
    assert not weighted["0.1"].keep.any()
    assert weighted["0.1"].sample.trainable > 0
    assert {t: w.advantage for t, w in weighted.items() if t != "0.1"} == {t: w.advantage for t, w in others.items()}


def test_decoupled_without_the_proximal_policy_is_refused() -> None:
    batch = pack(Grpo().weigh(random_samples(0), None))
    with pytest.raises(BadConfiguration, match="score the batch first"):
        Grpo(decoupled=True).loss(*numbers(batch), batch)


def test_by_name() -> None:
    assert algorithm("grpo", clip_high=0.3) == Grpo(clip_high=0.3)
    assert algorithm("sft") == Sft()


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("gpro", {}, "did you mean 'grpo'"),
        ("zzz", {}, "choose one of grpo, sft"),
        ("grpo", {"clip_hihg": 0.3}, "did you mean 'clip_high'"),
        ("grpo", {"clip_low": 1.0}, "clip_low"),
        ("grpo", {"minibatches": 0}, "above 0"),
        ("sft", {"clip_low": 0.1}, "no knob"),
    ],
)
def test_wrong_names_and_knobs_are_refused(name: str, knobs: dict[str, float], message: str) -> None:
    with pytest.raises(BadConfiguration, match=message):
        algorithm(name, **knobs)
