"""What may not train is never selected, whatever is asked, over histories with every disposition."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.consumers import clearance
from millrace.consumers.history.kinds import EVALUATIONS, EVENTS, TRAJECTORIES
from millrace.consumers.history.reader import History
from millrace.consumers.replay import selection
from millrace.consumers.replay.selection import Limits, Selected, Selector
from millrace.infra.config import load
from millrace.infra.log.base import Place
from tests.support.whole import NAMESPACE, POLICY, Whole, whole

LIMITS = Limits(1 << 20, 1 << 20)


@cache
def made(seed: int) -> Whole:
    return whole(seed)


def selector(seed: int, flags: dict[str, object] | None = None, limits: Limits = LIMITS) -> Selector:
    chosen = load(None, {"policy.name": POLICY, **(flags or {})})
    history = History(made(seed).bus, NAMESPACE, POLICY)
    return Selector(history, clearance.today(chosen, "branch"), chosen.policy.tenant, limits)


def places(seed: int) -> list[Place]:
    """Every place that anybody may name: samples, evaluations, events, holes, and topics that do not exist."""
    history = History(made(seed).bus, NAMESPACE, POLICY)
    found = [row.place for kind in (TRAJECTORIES, EVALUATIONS, EVENTS) for row in history.rows(kind)]
    return [*found, Place(history.names[TRAJECTORIES], 0, 1 << 40), Place("elsewhere.p.trajectories", 0, 0)]


def check(seed: int, found: Selected) -> None:
    """Nothing among the candidates that may not train."""
    history = History(made(seed).bus, NAMESPACE, POLICY)
    for one in found.candidates:
        assert one.place.topic == history.names[TRAJECTORIES]
        (row,) = history.fetch(TRAJECTORIES, [one.place])
        assert row is not None
        assert row["split"] == "train"
        assert row["tokens"] > 0
        for call in history.fetch(EVENTS, row.places("events")):
            assert call is not None
            assert call["governance"] is not None
            harmless = not call.body["output_ids"]["data"] and not call.body["prompt_ids"]["data"]
            assert call["governance"]["eligibility"] not in ("denied", "audit_only") or harmless


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2), st.data())
def test_whatever_places_are_asked_for(seed: int, data: st.DataObject) -> None:
    asked = data.draw(st.lists(st.sampled_from(places(seed)), max_size=60))
    found = selector(seed).by_places(asked)
    check(seed, found)
    assert len(found.candidates) + sum(found.left_out.values()) == len(asked), "each is a candidate or is counted"
    chosen = [one.place for one in found.candidates]
    assert chosen == [place for place in dict.fromkeys(asked) if place in set(chosen)], "in the order of the list"


@pytest.mark.parametrize("seed", range(3))
def test_a_rule_that_wants_all_gets_what_may_train(seed: int) -> None:
    found = selector(seed).by_rule(lambda _: True)
    check(seed, found)
    history = History(made(seed).bus, NAMESPACE, POLICY)
    total = sum(1 for kind in (TRAJECTORIES, EVALUATIONS) for _ in history.rows(kind))
    assert found.candidates
    assert len(found.candidates) + sum(found.left_out.values()) == total
    assert found.left_out[selection.EVALUATION] == sum(1 for _ in history.rows(EVALUATIONS)) > 0
    assert selector(seed).by_rule(lambda _: False).candidates == []


@pytest.mark.parametrize("rule", ["denied", "audit_only", "tenant_only"])
def test_rules_of_today_take_permission_away(rule: str) -> None:
    flags = {"governance.tenants.local.eligibility": rule}
    assert selector(0, flags).by_rule(lambda _: True).candidates == []
    if rule == "tenant_only":
        own = {**flags, "policy.tenant": "local"}
        assert selector(0, own).by_rule(lambda _: True).candidates, "content of a tenant trains its own policy"


def test_what_the_model_cannot_take_is_left_out() -> None:
    found = selector(0, limits=Limits(1 << 20, 1)).by_rule(lambda _: True)
    assert found.candidates == []
    assert found.left_out[selection.UNFIT] > 0
