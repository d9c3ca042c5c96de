"""Two policies with their own B, eta and rules live in one namespace: one refine, one seal, a dispatch and a learner
each. Every law holds for both, the audit of each is clean, and neither holds anything of the other."""

from __future__ import annotations

import logging
import random
from collections import Counter
from dataclasses import replace

import pytest

from millrace.consumers.audit.run import audit
from millrace.consumers.tell.command import explain_in
from millrace.consumers.tell.status import StatusWatch
from millrace.consumers.tell.summary import summary
from millrace.consumers.tell.topics import PolicyTopics
from millrace.infra.errors import TopicError
from millrace.streams.seal.policy_terms import policy_key
from millrace.streams.seal.stage import Seal
from millrace.testing.world import NAMESPACE, World
from tests.support.histories import Told, make_world, plan_of, play
from tests.support.players import Plan

SEEDS = range(25)
ACTIONS = 330
"""both policies share the scheduler, so each gets its part of these"""


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def plans_of(seed: int) -> list[Plan]:
    """Two policies on the same slots that differ in B and eta."""
    first, second = plan_of(seed), plan_of(seed + 10_000)
    second = replace(second, policy="q", slots=first.slots, batch=first.batch % 3 + 1, eta=(first.eta + 1) % 3)
    return [first, replace(second, random=random.Random(f"{seed} q"))]


def both(seed: int, inspect=None) -> list[Told]:
    plans = plans_of(seed)
    return play(seed, make_world(seed, plans), plans, ACTIONS, inspect)


def is_clean(world: World, plan: Plan) -> None:
    report = audit(world.bus, NAMESPACE, plan.policy, release=plan.release)
    broken = {finding.law: finding.violations[0] for finding in report.findings if not finding.holds}
    assert broken == {}


def test_two_policies_learn_side_by_side() -> None:
    told = both(3, is_clean)
    assert all(t.versions >= 2 and t.ready for t in told)
    assert both(3) == told


@pytest.mark.slow
def test_every_law_holds_for_both_whatever_happens() -> None:
    total: Counter[str] = Counter()
    for seed in SEEDS:
        for told in both(seed, is_clean):
            total += Counter(versions=told.versions, ready=told.ready)
    assert total["versions"] >= 4 * len(SEEDS), "histories must learn, else they prove nothing"


@pytest.mark.slow
def test_every_turn_of_every_stage_folds_again_to_what_it_wrote() -> None:
    for seed in SEEDS[:5]:
        both(seed, lambda world, plan: world.verify())


def test_seal_closes_the_groups_of_each_by_its_own_rules() -> None:
    plans = plans_of(3)
    plans = [replace(plans[0], short="train"), replace(plans[1], short="top-up")]

    def inspect(world: World, plan: Plan) -> None:
        for slot in range(plan.slots):
            assert world.state("seal", slot).get(policy_key(plan.policy))["short_groups"] == plan.short

    play(3, make_world(3, plans), plans, ACTIONS, inspect)


def test_what_is_asked_about_one_tells_nothing_of_the_other() -> None:
    def inspect(world: World, plan: Plan) -> None:
        other = "q" if plan.policy == "p" else "p"
        strangers = [sample["id"] for sample in world.decoded(f"{other}.trajectories")]
        tickets = {row["ticket"] for row in world.decoded(f"{plan.policy}.grants")}
        for ticket in sorted(tickets)[:5]:
            told = explain_in(PolicyTopics(world.bus, NAMESPACE, plan.policy), str(ticket)).text
            assert not [id for id in strangers if id in told]
        told = explain_in(PolicyTopics(world.bus, NAMESPACE, plan.policy), strangers[0]).text
        assert f"is of policy {other}" in told
        assert "is of policy" not in explain_in(PolicyTopics(world.bus, NAMESPACE, other), strangers[0]).text
        status = {
            "incarnation": "i",
            "role": "gateway",
            "state": "serving",
            "version": None,
            "label": None,
            "url": None,
        }
        status |= {"host": "h", "pid": 1, "error": None, "expires_at": world.now + 1, "time": world.now}
        for name in ("p", "q"):
            of = {"worker": "gateway", "policy": name}
            world.send("workers", f"gateway/{name}", "WorkerStatus", status | of)
        found = summary(world.bus, NAMESPACE, plan.policy, world.now)
        assert found.granted == len(tickets) + sum(
            row["ticket"] is not None and not row["solicited"] for row in world.decoded(f"{plan.policy}.resolutions")
        )
        assert [step.version for step in found.steps] == list(range(1, len(world.decoded(f"{plan.policy}.ledger"))))
        letters = [row for row in world.decoded("dead-letters") if row["policy"] in (None, plan.policy)]
        assert sum(count for _, _, count in found.refused) == len(letters)
        assert len(found.workers) == 1
        watch = StatusWatch(world.bus, NAMESPACE, plan.policy)
        while watch.poll(0):
            pass
        assert [worker["policy"] for worker in watch.workers.values()] == [plan.policy]
        watch.close()

    both(3, inspect)


@pytest.mark.slow
def test_dispatchers_that_share_a_name_break_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one of them goes on where the other stood, which lies beyond its own log."""
    monkeypatch.setattr("millrace.streams.dispatch.stage.stages_of", lambda policy: {"dispatch": "dispatch"})
    for seed in SEEDS[:5]:
        with pytest.raises((AssertionError, TopicError), match=r"P9|nothing lies at"):
            both(seed)


@pytest.mark.slow
def test_a_seal_that_knows_one_policy_alone_breaks_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seal, "_serves", lambda self, view, policy: policy == "p")
    with pytest.raises(AssertionError, match="P9"):
        both(3)
