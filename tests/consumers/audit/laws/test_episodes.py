"""The law about episodes, where a history ends them in ways of its own."""

from __future__ import annotations

import pytest

from millrace.consumers.audit import audit
from millrace.schemas import bounds
from millrace.testing.events import Episode
from millrace.testing.world import CALM, NAMESPACE
from tests.support.histories import begin, make_world, plan_of
from tests.support.players import POLICY, SECOND


def test_an_attempt_too_many_is_no_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start has a letter. Its end has none, since its group was sealed before; and a day later it is not missed."""
    monkeypatch.setattr(bounds, "ATTEMPTS", 1)
    plan = plan_of(0)
    with make_world(0, [plan], chances=CALM) as world:
        begin(world, plan)
        taken, refused = (Episode(root, policy=POLICY, group="g", attempt=root) for root in ("taken", "refused"))
        for event in (taken.start(), refused.start(), taken.call("reply"), taken.end(), taken.reward(1.0)):
            world.send("raw", taken.key, "Event", event)
        world.drain()
        world.send("raw", taken.key, "Event", refused.end())
        for _ in range(3):
            world.advance(28_800 * SECOND)
            world.drain()
        reasons = [row["reason"] for row in world.decoded("dead-letters")]
        report = audit(world.bus, NAMESPACE, POLICY, release=plan.release)
    assert "too_many_attempts" in reasons
    assert report.clean, report.violations[:3]
    assert report.finding("episodes").facts["running"] == 0
