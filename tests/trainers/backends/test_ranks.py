"""The FSDP2 backend on real processes: layouts agree, one layout repeats its bytes, groups come and go in place."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.algorithms.distill import Distill
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.algorithms.sft import Sft
from millrace.trainers.learning import Report
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.state import State
from tests.support.ranks import Ranks
from tests.support.samples import VOCABULARY, random_samples, small_state
from tests.support.steps import form_again, form_and_leave, form_and_wait, form_in_vain_then_together, train

pytestmark = pytest.mark.slow

LOSS, NORM, WEIGHT = 1.5e-6, 5e-7, 5e-5
"""Tolerances across layouts: absolute loss, relative gradient norm, absolute weight after three steps at lr 1e-3."""

Outcome = tuple[list[list[Report]], State]
"""Reports by rank and batch; the state that rank 0 gathered."""


def run(
    ranks: Ranks, world: int, state: State, algorithm: Algorithm, batches: int = 2, budget: int = 10**6, **shape: int
) -> Outcome:
    data = [random_samples(seed, **shape) for seed in range(batches)]
    results = ranks.run(train, world, state, algorithm, data, budget)
    return [reports for reports, _ in results], results[0][1]


def assert_close(ours: Outcome, theirs: Outcome) -> None:
    for mine, other in zip(ours[0][0], theirs[0][0], strict=True):
        assert mine.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=LOSS)
        assert mine.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=NORM)
        assert mine.masked_tokens == other.masked_tokens
        for name in {"value_loss", "value_grad_norm"} & mine.metrics.keys():
            assert mine.metrics[name] == pytest.approx(other.metrics[name], rel=5e-6)
        for name in ("reward_mean", "staleness_mean", "staleness_max", "tokens_trainable", "steps"):
            assert mine.metrics[name] == pytest.approx(other.metrics[name])
    assert ours[1].step == theirs[1].step
    for name, weight in theirs[1].weights.items():
        torch.testing.assert_close(ours[1].weights[name], weight, rtol=0, atol=WEIGHT)
    assert (ours[1].critic is None) == (theirs[1].critic is None)
    if ours[1].critic is not None and theirs[1].critic is not None:
        for name, weight in theirs[1].critic.weights.items():
            torch.testing.assert_close(ours[1].critic.weights[name], weight, rtol=0, atol=WEIGHT)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        ("qwen2", policy("grpo")),
        ("qwen2", policy("decoupled")),
        ("qwen3", policy("grpo", minibatches=3)),
        ("qwen2", policy("ppo")),
        ("qwen3", policy("reinforce++-baseline", kl_coef=0.1)),
        ("qwen2", policy("m2po")),
        ("qwen2", policy("gspo", recompute=True)),
        ("qwen2", policy("gmpo", entropy_coef=0.05)),
        ("qwen2", Distill()),
        ("qwen2", Sft()),
    ],
)
def test_layouts_agree(ranks: Ranks, world: int, kind: str, algorithm: Algorithm) -> None:
    state = small_state(kind)
    alone = run(ranks, 1, state, algorithm)
    together = run(ranks, world, state, algorithm)
    assert_close(together, alone)
    for reports in together[0][1:]:
        assert [r.shares for r in reports] == [r.shares for r in together[0][0]], "all ranks report the same"
    shares = together[0][0][0].shares
    assert len(shares) == world
    assert all(share.tokens > 0 for share in shares)
    assert sum(share.tokens for share in shares) == alone[0][0][0].shares[0].tokens


@pytest.mark.parametrize("world", [1, 2, 3])
def test_same_layout_same_bytes(ranks: Ranks, world: int, tmp_path: object) -> None:
    first, second = (run(ranks, world, small_state(), policy("grpo"))[1] for _ in range(2))
    assert checkpoint.fingerprint(first) == checkpoint.fingerprint(second)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    world=st.integers(1, 3),
    budget=st.sampled_from([30, 100, 10**6]),
    groups=st.integers(1, 5),
    group_size=st.integers(1, 3),
)
def test_cuts_do_not_matter(ranks: Ranks, world: int, budget: int, groups: int, group_size: int) -> None:
    state = small_state(seed=1)
    shape = {"groups": groups, "group_size": group_size}
    whole = run(ranks, 1, state, policy("grpo"), 1, **shape)
    cut = run(ranks, world, state, policy("grpo"), 1, budget, **shape)
    if whole[0][0][0].metrics["grad_norm"] == 0:
        assert cut[0][0][0].metrics["grad_norm"] == pytest.approx(0, abs=1e-7)
    else:
        assert_close(cut, whole)


def test_state_moves_between_world_sizes(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> None:
    """1 rank, save, 3 ranks, save, 2 ranks: as 1 rank throughout."""
    data = [random_samples(seed) for seed in range(3)]
    root = tmp_path_factory.mktemp("weights")
    state = small_state()
    for version, world in enumerate([1, 3, 2]):
        state = ranks.run(train, world, state, policy("grpo"), [data[version]])[0][1]
        state = checkpoint.read(checkpoint.write(root, version, state).path)
    unbroken = small_state()
    for batch in data:
        unbroken = ranks.run(train, 1, unbroken, policy("grpo"), [batch])[0][1]
    assert state.step == unbroken.step == 6
    for name, weight in unbroken.weights.items():
        torch.testing.assert_close(state.weights[name], weight, rtol=0, atol=WEIGHT)
    for slot, moments in unbroken.moments.items():
        for name, moment in moments.items():
            torch.testing.assert_close(state.moments[slot][name], moment, rtol=1e-3, atol=1e-6)


def test_a_rank_that_formed_in_vain_finds_its_peers_the_next_time(ranks: Ranks) -> None:
    assert ranks.run(form_in_vain_then_together, 2) == [[2.0]] * 2


@pytest.mark.parametrize("pieces", [None, 9 * VOCABULARY], ids=["whole", "in-pieces"])
def test_groups_come_and_go_in_one_process(ranks: Ranks, pieces: int | None) -> None:
    """Nothing of a group survives it: neither threads nor descriptors."""
    for seen in ranks.run(form_again, 2, small_state(), 8, pieces):
        assert {threads for _, threads in seen} == {0}
        assert seen[-1][0] <= seen[2][0], f"descriptors leak: {seen}"


def test_leaving_alone_frees_the_peers(ranks: Ranks) -> None:
    """The process group's timeout is far away: only closed sockets end the wait."""
    stayed, *_, left = ranks.run(form_and_leave, 2, small_state(), 300.0)
    assert left == "left"
    assert stayed, "the collective failed"
    assert ranks.run(train, 2, small_state(), Sft(), [random_samples(0)])


def test_killed_peer_then_smaller_group() -> None:
    with Ranks(3) as pool:
        pool.run(form_again, 3, small_state(), 1)
        store = pool.start(form_and_wait, range(3), small_state(), 300.0)
        store.wait([f"looping/{rank}" for rank in range(3)])
        os.kill(pool.processes[1].pid, signal.SIGKILL)
        assert pool.finish(0)
        assert pool.finish(2)
        pool.start(train, [2, 0], small_state(), Sft(), [random_samples(0)])
        reports, _ = pool.finish(0)
        assert len(reports[0].shares) == 2
        assert pool.finish(2)[1] is not None, "the other survivor is rank 0 now"


def test_frozen_peer_ends_at_the_timeout() -> None:
    with Ranks(2) as pool:
        pool.run(form_again, 2, small_state(), 1)
        store = pool.start(form_and_wait, range(2), small_state(), 10.0)
        store.wait([f"looping/{rank}" for rank in range(2)])
        os.kill(pool.processes[1].pid, signal.SIGSTOP)
        try:
            assert pool.finish(0, timeout=60)
        finally:
            os.kill(pool.processes[1].pid, signal.SIGCONT)
        assert pool.finish(1, timeout=60)
        assert pool.run(train, 2, small_state(), Sft(), [random_samples(0)])
