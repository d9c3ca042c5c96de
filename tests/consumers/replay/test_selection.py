"""What may not train is never selected, whatever is asked, over histories with every disposition."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.consumers import clearance
from millrace.consumers.replay import selection
from millrace.consumers.replay.selection import ModelLimits, SelectionResult, Selector
from millrace.consumers.replay.text import Texts, Writer
from millrace.dialects.rendering.choose import choose
from millrace.infra.config import load
from millrace.infra.log.base import Place
from millrace.infra.log.history.kinds import EVALUATIONS, EVENTS, TRAJECTORIES
from millrace.infra.log.history.reader import History
from millrace.testing.events import Episode
from millrace.testing.world import World
from tests.support import chat_tokenizer
from tests.support.players import SECOND
from tests.support.whole import NAMESPACE, POLICY, Whole, whole

LIMITS = ModelLimits(1 << 20, 1 << 20)
TEXT = {"prompt": (), "output": (), "trainable": False}
TALKS = 8


def talk(world: World) -> None:
    """Episodes of text alone: plain ones, evaluations, and ones in which a secret was said."""
    for number in range(TALKS):
        split = "evaluation" if number % 4 == 1 else "train"
        episode = Episode(f"talk-{number}", split=split, policy=POLICY, source="p-gateway-7")
        asked = {"messages": [{"role": "user", "content": "a secret-1" if number % 4 == 2 else "What is 3 + 4?"}]}
        reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": f"{number}"}}]}).encode()
        changed = {"request": json.dumps(asked).encode(), "response": reply, "untrainable_reason": "imported"}
        for event in (episode.start(), episode.call(f"said-{number}", changed=changed, **TEXT), episode.end()):
            world.send("raw", episode.key, "Event", event, source=episode.source)
        world.send("raw", episode.key, "Event", episode.reward(1.0))
    world.drain()
    world.advance(60 * SECOND)
    world.drain()


@cache
def made(seed: int) -> Whole:
    return whole(seed, later=talk)


@pytest.fixture(scope="session")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Writer:
    folder = chat_tokenizer.write(tmp_path_factory.mktemp("form"))
    return Writer(lambda: choose(folder, "auto"), 1 << 20, 1 << 20)


def selector(
    seed: int, flags: dict[str, object] | None = None, limits: ModelLimits = LIMITS, writer: Writer | None = None
) -> Selector:
    chosen = load(None, {"policy.name": POLICY, **(flags or {})})
    history = History(made(seed).bus, NAMESPACE, POLICY)
    return Selector(history, clearance.today(chosen, "branch"), chosen.policy.tenant, limits, writer)


def places(seed: int) -> list[Place]:
    """Every place that anybody may name: samples, evaluations, events, holes, and topics that do not exist."""
    history = History(made(seed).bus, NAMESPACE, POLICY)
    found = [row.place for kind in (TRAJECTORIES, EVALUATIONS, EVENTS) for row in history.rows(kind)]
    return [*found, Place(history.names[TRAJECTORIES], 0, 1 << 40), Place("elsewhere.p.trajectories", 0, 0)]


def check(seed: int, found: SelectionResult) -> None:
    """Nothing among the candidates that may not train."""
    history = History(made(seed).bus, NAMESPACE, POLICY)
    for one in found.candidates:
        assert one.place.topic == history.names[TRAJECTORIES]
        (row,) = history.fetch(TRAJECTORIES, [one.place])
        assert row is not None
        assert row["split"] == "train"
        assert row["tokens"] + one.texts > 0
        for call in history.fetch(EVENTS, row.places("events")):
            assert call is not None
            assert call["governance"] is not None
            harmless = not call.body["output_ids"]["data"] and not call.body["prompt_ids"]["data"]
            assert call["governance"]["eligibility"] not in ("denied", "audit_only") or harmless


@pytest.mark.slow
@pytest.mark.parametrize("text", [False, True])
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2), st.data())
def test_whatever_places_are_asked_for(writer: Writer, text: bool, seed: int, data: st.DataObject) -> None:
    asked = data.draw(st.lists(st.sampled_from(places(seed)), max_size=60))
    found = selector(seed, writer=writer if text else None).by_places(asked)
    check(seed, found)
    assert len(found.candidates) + sum(found.left_out.values()) == len(asked), "each is a candidate or is counted"
    chosen = [one.place for one in found.candidates]
    assert chosen == [place for place in dict.fromkeys(asked) if place in set(chosen)], "in the order of the list"
    assert text or not any(one.texts for one in found.candidates)


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_rule_that_wants_all_gets_what_may_train(writer: Writer, seed: int, text: bool) -> None:
    of = selector(seed, writer=writer if text else None)
    found = of.by_rule(lambda _: True)
    check(seed, found)
    history = History(made(seed).bus, NAMESPACE, POLICY)
    total = sum(1 for kind in (TRAJECTORIES, EVALUATIONS) for _ in history.rows(kind))
    assert found.candidates
    assert len(found.candidates) + sum(found.left_out.values()) == total
    assert found.left_out[selection.EVALUATION] == sum(1 for _ in history.rows(EVALUATIONS)) > 0
    assert selector(seed).by_rule(lambda _: False).candidates == []
    talks = {one.id for one in found.candidates if one.id.startswith("talk-")}
    assert talks == ({f"talk-{n}" for n in range(TALKS) if n % 4 in (0, 3)} if text else set())
    for one, texts in zip(found.candidates, of.texts([one.place for one in found.candidates]), strict=True):
        assert isinstance(texts, Texts)
        assert (texts.replies, len(texts.samples)) == (one.texts, one.texts)


def test_text_is_cleared_anew_when_it_is_read(writer: Writer) -> None:
    found = selector(0, writer=writer).by_rule(lambda _: True)
    there = [one.place for one in found.candidates if one.texts]
    denied: Any = {"governance.tenants.local.eligibility": "denied"}
    assert selector(0, denied, writer=writer).texts(there) == [selection.TENANT] * len(there) != []
    gone = Place("elsewhere.p.trajectories", 0, 0)
    assert selector(0, writer=writer).texts([gone]) == [selection.UNREADABLE]


@pytest.mark.parametrize("rule", ["denied", "audit_only", "tenant_only"])
def test_rules_of_today_take_permission_away(writer: Writer, rule: str) -> None:
    flags = {"governance.tenants.local.eligibility": rule}
    assert selector(0, flags, writer=writer).by_rule(lambda _: True).candidates == []
    if rule == "tenant_only":
        own = {**flags, "policy.tenant": "local"}
        assert selector(0, own).by_rule(lambda _: True).candidates, "content of a tenant trains its own policy"


def test_what_the_model_cannot_take_is_left_out() -> None:
    found = selector(0, limits=ModelLimits(1 << 20, 1)).by_rule(lambda _: True)
    assert found.candidates == []
    assert found.left_out[selection.UNFIT] > 0
