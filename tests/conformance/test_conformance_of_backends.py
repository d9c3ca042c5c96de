"""One suite for every backend and layout: the numbers of a single process, within tolerances."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from millrace.trainers.algorithms.distill import Distill
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.backends.base import Adam
from millrace.trainers.backends.layout import parse
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.weights import checkpoint
from tests.conformance.cases import DENSE, EXPERTS, MOE, QWEN2, QWEN3, Case, model_state
from tests.conformance.compare import Errors, check, errors
from tests.conformance.run import CLIP, STEPS, Outcome, steps, train, train_layout
from tests.support.ranks import RankFailed, Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Pool = Callable[[str], Ranks]
Reference = Callable[[str], Outcome]
Record = Callable[[Case, Errors | str], None]


def run(pool: Pool, case: Case, state: object = None, first: int = 0, last: int = STEPS) -> list[Outcome]:
    begin = model_state(case.model) if state is None else state
    job = (case.layout, dict(case.options), case.prepare, begin, steps(first, last))
    return pool(case.backend).run(train_layout, case.world, *job)


def test_a_layout_equals_one_process(case: Case, pool: Pool, reference: Reference, record: Record) -> None:
    if case.error:
        with pytest.raises(RankFailed, match=case.error) as failed:
            run(pool, case)
        found = re.search(case.error, str(failed.value))
        assert found is not None
        record(case, found[0])
        return
    outcomes = run(pool, case)
    measured = errors(outcomes[0], reference(case.model))
    record(case, measured)
    check(measured, case.allowed)
    layout = parse(case.layout)
    for other in outcomes[1:]:
        assert (other.losses, other.norms) == (outcomes[0].losses, outcomes[0].norms), "all ranks report the same"
        assert other.state is None
    assert sorted(outcome.data_rank for outcome in outcomes) == sorted(list(range(layout.d)) * layout.cell)
    assert parse(outcomes[0].layout) == layout


@pytest.mark.parametrize(
    ("layout", "model", "settings"),
    [
        ("torch:t2", QWEN2, {"tie_word_embeddings": True, "pad_token_id": 5}),
        ("torch:d2t2e4", MOE, {}),
    ],
)
def test_every_role_has_its_place(pool: Pool, layout: str, model: str, settings: dict[str, Any]) -> None:
    """A critic that learns, a reference and a teacher that only score; and embeddings that are the head too."""
    state = model_state(model, **settings)
    for algorithm in (policy("ppo", minibatches=1), policy("grpo", minibatches=1, kl_coef=0.1), Distill()):
        wanted = [(algorithm, 0), (algorithm, 1)]
        alone = train(TorchBackend(Adam(weight_decay=0.01, clip=CLIP), device="cpu"), 0, 1, None, state, wanted)
        together = pool("torch").run(train_layout, parse(layout).world, layout, {}, None, state, wanted)[0]
        check(errors(together, alone), EXPERTS)
        assert alone.state is not None
        assert together.state is not None
        assert (alone.state.critic is None) == (together.state.critic is None)
        if alone.state.critic is not None and together.state.critic is not None:
            for name, weight in alone.state.critic.weights.items():
                torch.testing.assert_close(together.state.critic.weights[name], weight, rtol=0, atol=EXPERTS.weight)


def test_a_layout_repeats_its_bytes(pool: Pool) -> None:
    case = Case("torch:d2t2e4", MOE)
    first, second = (run(pool, case, None, 0, 2)[0].state for _ in range(2))
    assert first is not None
    assert second is not None
    assert checkpoint.fingerprint(first) == checkpoint.fingerprint(second)


@pytest.mark.parametrize(
    ("layout", "model", "reason"),
    [
        ("torch:t3", QWEN3, "8 attention heads do not divide over t3"),
        ("torch:d2e2", QWEN2, "Qwen2ForCausalLM has no experts to spread over e2"),
        ("torch:d3e3", MOE, "4 experts do not divide over e3"),
    ],
)
def test_a_model_that_does_not_divide_says_why(pool: Pool, layout: str, model: str, reason: str) -> None:
    with pytest.raises(RankFailed, match=f"BadConfiguration: {reason}"):
        run(pool, Case(layout, model), None, 0, 1)


PATH = ["torch:d2t2", "torch:d2", "torch:t4"]
"""Layouts that one run goes through, a step in each."""


def test_a_run_goes_on_in_another_layout(pool: Pool, reference: Reference) -> None:
    """Gathered under one layout, loaded under the next: as if one process had never stopped."""
    state = model_state(QWEN3)
    losses, norms = [], []
    for index, layout in enumerate([*PATH, PATH[0]]):
        outcome = run(pool, Case(layout, QWEN3), state, index, index + 1)[0]
        assert outcome.state is not None
        state = outcome.state
        losses += outcome.losses
        norms += outcome.norms
    whole = Outcome(losses, norms, PATH[-1], 0, state)
    check(errors(whole, reference(QWEN3)), DENSE)
    theirs = reference(QWEN3).state
    assert theirs is not None
    assert state.moments.keys() == theirs.moments.keys()
    for slot, moments in theirs.moments.items():
        for name, moment in moments.items():
            torch.testing.assert_close(state.moments[slot][name], moment, rtol=1e-3, atol=1e-6)
