"""When the demo's faults strike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.apps.demo.plan import FULL_DEMO, SHORT_DEMO, PlannedFault

COUNTS = st.integers(0, 100)


@given(COUNTS, COUNTS, COUNTS)
def test_a_learner_dies_in_the_step_of_the_next_version(version: int, ready: int, batch: int) -> None:
    fault = PlannedFault(12, "kill", "learn-1")
    due = fault.is_due(version, ready, batch)
    assert not due or version >= 12
    assert due or version < 12 or (version == 12 and ready < batch)
    assert fault.is_due(13, ready, batch), "a step that was over before anybody looked holds nothing up"


@given(COUNTS, COUNTS, COUNTS)
def test_whoever_trains_nothing_dies_or_joins_at_once(version: int, ready: int, batch: int) -> None:
    for fault in (PlannedFault(12, "kill", "dispatch"), PlannedFault(12, "join", "learn-2")):
        assert fault.is_due(version, ready, batch) == (version >= 12)


def test_every_plan_kills_a_learner() -> None:
    assert all(any(fault.learner for fault in plan.faults) for plan in (FULL_DEMO, SHORT_DEMO))
