"""Roles on ranks of their own: the numbers of one process that plays them all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.algorithms.distill import Distill
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.backends.base import Adam
from millrace.trainers.backends.layout import ROLES, parse_allocation
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.weights import checkpoint
from tests.conformance.cases import DENSE, EXPERTS, MOE, QWEN2, QWEN3, Tolerance, model_state
from tests.conformance.compare import check, errors
from tests.conformance.run import CLIP, Outcome, train, train_layout
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Pool = Callable[[str], Ranks]

FROZEN = policy("grpo", minibatches=1, kl_coef=0.1, teacher_coef=0.1, reward_model_coef=0.5)
CRITIC = policy("ppo", minibatches=2, kl_coef=0.1)


def run(
    pool: Pool, layout: str, model: str, algorithm: Algorithm, batches: int = 2, **options: object
) -> list[Outcome]:
    wanted = [(algorithm, seed) for seed in range(batches)]
    world = parse_allocation(layout).world
    return pool("torch").run(train_layout, world, layout, options, None, model_state(model), wanted)


@pytest.mark.parametrize(
    ("layout", "model", "algorithm", "allowed"),
    [
        ("torch[actor]:d1+torch[reference]:d1", QWEN2, FROZEN, DENSE),
        ("torch[actor]:d1+torch[critic]:d1", QWEN2, CRITIC, DENSE),
        ("torch[actor]:d2+torch[critic]:d1", QWEN2, CRITIC, DENSE),
        ("torch[critic]:d2+torch[actor]:d1", QWEN3, CRITIC, DENSE),
        ("torch[actor]:d2+torch[critic]:d1+torch[reference]:d1", QWEN2, CRITIC, DENSE),
        ("torch[actor]:d2+torch[teacher]:d1|torch[reward_model]:d1|torch[reference]:d1", QWEN3, FROZEN, DENSE),
        ("torch[actor]:t2+torch[critic]:t2|torch[reference]:t2", QWEN3, CRITIC, DENSE),
        ("torch[actor]:p2+torch[critic]:d2", QWEN2, CRITIC, DENSE),
        ("torch[actor]:d2|torch[teacher]:d2+torch[critic]:d2", QWEN2, Distill(), DENSE),
        ("torch[actor]:d2e2+torch[critic]:d1", MOE, CRITIC, EXPERTS),
    ],
)
def test_roles_apart_equal_one_process(
    pool: Pool, layout: str, model: str, algorithm: Algorithm, allowed: Tolerance
) -> None:
    alone_backend = TorchBackend(Adam(weight_decay=0.01, clip=CLIP), device="cpu")
    wanted = [(algorithm, seed) for seed in range(2)]
    alone = train(alone_backend, 0, 1, None, model_state(model), wanted)
    outcomes = run(pool, layout, model, algorithm)
    check(errors(outcomes[0], alone), allowed)
    for other in outcomes[1:]:
        assert (other.losses, other.norms) == (outcomes[0].losses, outcomes[0].norms), "all ranks report the same"
        assert other.state is None
    together = outcomes[0].state
    assert together is not None
    assert alone.state is not None
    assert (together.critic is None) == (alone.state.critic is None)
    if together.critic is not None and alone.state.critic is not None:
        assert together.critic.step == alone.state.critic.step > 0
        for name, weight in alone.state.critic.weights.items():
            torch.testing.assert_close(together.critic.weights[name], weight, rtol=0, atol=allowed.weight)
        for slot, moments in alone.state.critic.moments.items():
            for name, moment in moments.items():
                torch.testing.assert_close(together.critic.moments[slot][name], moment, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "model"), [("torch:t2", QWEN3), ("torch:p2", QWEN2), ("torch:c2", QWEN2), ("torch:d2e2", MOE)]
)
def test_every_split_gives_the_same_bytes_with_idle_roles_off_the_device(pool: Pool, layout: str, model: str) -> None:
    for algorithm in (CRITIC, FROZEN, Distill()):
        kept, moved = (run(pool, layout, model, algorithm, offload=roles)[0].state for roles in ((), ROLES))
        assert kept is not None
        assert moved is not None
        assert checkpoint.fingerprint(moved) == checkpoint.fingerprint(kept)


def test_the_same_allocation_gives_the_same_bytes(pool: Pool) -> None:
    """Also with its roles off the device between their uses."""
    layout = "torch[actor]:d2+torch[critic]:d1|torch[reference]:d1"
    digests = set()
    for options in ({}, {}, {"offload": ("actor", "critic", "reference")}):
        state = run(pool, layout, QWEN2, CRITIC, **options)[0].state
        assert state is not None
        digests.add(checkpoint.fingerprint(state))
    assert len(digests) == 1
