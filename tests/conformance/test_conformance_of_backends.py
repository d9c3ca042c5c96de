"""One suite for every backend and layout: the numbers of a single process, within tolerances."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from tests.support.conformance.cases import DENSE, QWEN3, Case, model_state
from tests.support.conformance.compare import Errors, check, errors
from tests.support.conformance.run import STEPS, Outcome, steps, train_layout
from tests.support.ranks import RankFailed, Ranks
from trainers.backends.layout import parse

pytestmark = pytest.mark.slow

Pool = Callable[[str], Ranks]
Reference = Callable[[str], Outcome]
Record = Callable[[Case, Errors | str], None]


def run(pool: Pool, case: Case, state: object = None, first: int = 0, last: int = STEPS) -> list[Outcome]:
    begin = model_state(case.model) if state is None else state
    job = (case.layout, dict(case.options), case.prepare, begin, steps(first, last))
    return pool(case.backend).run(train_layout, case.world, *job)


@pytest.mark.timeout(600)
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


PATH = ["torch:d2", "torch:d4", "torch:d1"]
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
