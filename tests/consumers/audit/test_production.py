"""The audit over what production runner and stages write while everything around them fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from millrace.consumers.audit import AuditReport, audit
from millrace.testing.world import NAMESPACE, World
from tests.support import histories, laws
from tests.support.players import POLICY, Plan


def reports(seeds: range, **mutation: bool) -> list[AuditReport]:
    """The audit of every history of these seeds."""
    found: list[AuditReport] = []

    def inspect(world: World, plan: Plan) -> None:
        found.append(audit(world.bus, NAMESPACE, POLICY, release=plan.release))

    for seed in seeds:
        histories.run(seed, inspect=inspect, **mutation)
    return found


@pytest.mark.slow
def test_histories_of_the_production_stages_are_clean() -> None:
    for seed, report in enumerate(reports(range(8))):
        assert report.clean, (seed, report.violations[:3])
        assert report.finding("tokens").checked, "samples were compared with their calls"


@pytest.mark.slow
def test_many_histories_are_clean() -> None:
    for seed, report in enumerate(reports(range(100, 160)), 100):
        assert report.clean, (seed, report.violations[:3])


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["fencing", "skip_duplicates"])
def test_the_audit_sees_what_a_missing_guard_lets_through(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fence a zombie's turns count twice; without marks, what was sent twice."""
    monkeypatch.setattr(laws, "check", lambda *_: SimpleNamespace(weights=[0], ready=[]))
    monkeypatch.setattr(histories, "finish", lambda world, *_: world.drain())
    found = reports(range(30), **{missing: False})
    assert any(not report.clean for report in found)
