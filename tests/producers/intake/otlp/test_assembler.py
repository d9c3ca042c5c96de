"""Spans come in batches, late, in any order and more than once: what becomes of them is the same."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.producers.intake.otlp.assembler import LARGEST, LONGEST, MEMORY, SECOND
from tests.support.imported import GEN_AI
from tests.support.spans import TRACES, Folded, a_call, a_span, an_evaluation, conversations, read_spans

AGENT = {"gen_ai.operation.name": "invoke_agent"}


def whole(spans: list[Any], quiet: int = 10) -> Folded:
    """All at once."""
    made = Folded(quiet)
    made.took(spans, 1)
    made.close(1 + quiet)
    return made


@given(conversations(), st.randoms(use_true_random=False))
def test_neither_order_nor_batches_nor_repetition_make_a_difference(given: list[Any], chance: random.Random) -> None:
    spans = read_spans(given)
    first = whole(spans)
    again = [*spans, *chance.sample(spans, chance.randint(0, len(spans)))]
    chance.shuffle(again)
    made = Folded()
    at = 0
    while again:
        cut = chance.randint(1, len(again))
        made.took(again[:cut], at)
        again, at = again[cut:], at + 1
    made.close(at + 10)
    assert sorted(made.told, key=str) == sorted(first.told, key=str)


@given(conversations())
def test_every_trajectory_is_one_chain_with_a_beginning_and_an_end(given: list[Any]) -> None:
    made = whole(read_spans(given))
    by: dict[str, list[Any]] = {}
    for one in made.events:
        by.setdefault(one.kin.id, []).append(one)
    for events in by.values():
        kinds = [one.draft.kind for one in events]
        assert [one.step for one in events] == list(range(len(events)))
        assert (kinds[0], kinds[-1]) == ("episode_started", "episode_ended")
        assert kinds.count("episode_started") == kinds.count("episode_ended") == 1
        assert "model_call" in kinds
        kin = events[0].kin
        assert (kin.parent is None) == (kin.id == kin.root) == (kin.root == kin.group and kin.parent is None)
        assert kin.parent is None or kin.parent in by
    assert len({one.id for one in made.events}) == len(made.events)


@given(conversations())
def test_each_reply_is_one_call_or_counted(given: list[Any]) -> None:
    made = whole(read_spans(given))
    ids = Counter(json.loads(body["response"])["id"] for body in made.bodies("model_call"))
    known = {
        str(value["value"].get("stringValue"))
        for one in given
        for value in one["attributes"]
        if value["key"] == "gen_ai.response.id" and "startTimeUnixNano" in one
    }
    assert set(ids) == known
    assert set(ids.values()) <= {1}
    for body in made.bodies("model_call"):
        assert (body["trainable"], body["untrainable_reason"], body["engine"]) == (False, "observed", "otlp")


@given(conversations(), st.integers(1, 5))
def test_what_comes_again_after_the_end_makes_nothing(given: list[Any], times: int) -> None:
    spans = read_spans(given)
    made = whole(spans)
    before = list(made.told)
    for number in range(times):
        made.took(spans, 20 + 20 * number)
        made.close(35 + 20 * number)
    assert [one for one in made.told if one not in before] == []


def test_a_conversation_is_every_trace_that_names_it() -> None:
    name = {"gen_ai.conversation.id": "c"}
    spans = read_spans(
        [a_span(n, a_call("q", "a", f"r{n}") | name, trace=TRACES[n]) for n in range(2)]
        + [a_span(3, a_call("q", "a", "r3"), trace=TRACES[2])]
    )
    made = whole(spans)
    assert sorted(Counter(one.kin.id for one in made.events if one.draft.kind == "model_call").values()) == [1, 2]


def test_what_comes_after_the_end_is_a_further_episode() -> None:
    first, second = (read_spans([a_span(n, a_call("q", "a", f"r{n}"))]) for n in (1, 2))
    made = whole(first)
    made.took(second, 100)
    made.close(110)
    assert len({one.kin.id for one in made.events}) == 2
    assert len(made.bodies("model_call")) == 2


def test_the_quiet_begins_again_with_each_span_and_ends_all_the_same() -> None:
    made = Folded(10)
    for number in range(3):
        made.took(read_spans([a_span(number + 1, a_call("q", "a", f"r{number}"))]), 5 * number)
        assert made.close(5 * number + 9) == 0
    assert made.close(20) == 1
    busy = Folded(LONGEST)
    busy.took(read_spans([a_span(1, a_call("q", "a", "r"))]), 0)
    busy.took(read_spans([a_span(2, a_call("q", "a", "s"))]), LONGEST - 1)
    assert (busy.close(LONGEST - 1), busy.close(LONGEST)) == (0, 1)


def test_a_conversation_that_holds_too_much_is_over() -> None:
    made = Folded(LONGEST)
    long = "x" * (LARGEST // 2)
    made.took(read_spans([a_span(1, a_call(long, "a", "r1"))]), 1)
    assert made.close(2) == 0
    made.took(read_spans([a_span(2, a_call(long, "a", "r2"))]), 2)
    assert made.close(3) == 1


def test_a_nested_agent_is_a_child_and_knows_the_tool_call_that_began_it() -> None:
    tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "ask", "gen_ai.tool.call.id": "t1"}
    spans = [
        a_span(1, AGENT),
        a_span(2, a_call("q", "a", "r2"), parent=1),
        a_span(3, tool, parent=1),
        a_span(4, {"http.method": "POST"}, parent=3),
        a_span(5, AGENT | {"gen_ai.agent.name": "helper"}, parent=4),
        a_span(6, a_call("q", "a", "r6"), parent=5),
    ]
    made = whole(read_spans(spans))
    root, child = sorted({one.kin for one in made.events}, key=lambda kin: kin.parent is not None)
    assert (child.parent, child.root, child.group, child.spawn_call) == (root.id, root.id, root.id, "t1")
    kinds = [(one.kin is root or one.kin == root, one.draft.kind) for one in made.events]
    assert kinds[0] == (True, "episode_started")
    assert kinds[-1] == (True, "episode_ended")
    assert made.bodies("episode_started")[1]["versions"]["agent"] == "helper"


def test_an_agent_of_which_nothing_was_said_is_part_of_the_one_above() -> None:
    spans = [a_span(1, AGENT), a_span(2, a_call("q", "a", "r2"), parent=1), a_span(3, AGENT, parent=1)]
    made = whole(read_spans(spans))
    assert len({one.kin.id for one in made.events}) == 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("how", ["reply", "span", "other trace", "trace"])
def test_an_evaluation_is_a_reward_before_and_after_the_end(how: str, late: bool) -> None:
    call = read_spans([a_span(1, a_call("q", "a", "r1"))])
    judged = {
        "reply": an_evaluation(9, 0.5, trace="", **{"gen_ai.response.id": "r1"}),
        "span": an_evaluation(9, 0.5, span=1),
        "other trace": an_evaluation(9, 0.5, trace=TRACES[2], span=7, **{"gen_ai.response.id": "r1"}),
        "trace": an_evaluation(9, 0.5, span=8),
    }[how]
    made = Folded(10)
    made.took(call, 1)
    if late:
        made.close(11)
    for at in (12, 13):
        made.took(read_spans([judged]), at)
    made.close(30)
    (reward,) = made.bodies("reward")
    (reply,) = made.bodies("model_call")
    root = made.events[0].kin.id
    assert (reward["value"], reward["source"], reward["independent"]) == (0.5, "otlp:judge", False)
    assert (reward["target_kind"], reward["target"]) == (
        ("trajectory", root) if how == "trace" else ("turn", reply["response_id"])
    )
    kinds = [one.draft.kind for one in made.events]
    assert kinds[-1] == ("reward" if late else "episode_ended")
    assert [one.step for one in made.events] == list(range(len(kinds)))


def test_an_evaluation_of_nothing_known_is_dropped_in_time() -> None:
    made = Folded(10)
    made.took(read_spans([an_evaluation(9, 0.5, **{"gen_ai.response.id": "nobody"})]), 1)
    assert made.assembler.since == 0
    made.took([], LONGEST + 2)
    assert (made.assembler.since, made.events) == (None, [])
    assert made.assembler.passed == {"evaluation of an unknown reply": 1}


def test_what_the_gateway_captured_is_passed_over() -> None:
    both = read_spans([a_span(1, a_call("q", "a", "ours")), a_span(2, a_call("q", "a", "theirs"))])
    made = Folded()
    made.took(both, 1)
    made.close(20, captured=["ours"])
    assert [body["turn"] for body in made.bodies("model_call")] == [0]
    assert made.assembler.passed["call in the log already"] == 1
    alone = Folded()
    alone.took(both[:1], 1)
    alone.close(20, captured=["ours"])
    assert alone.events == []
    assert alone.assembler.passed == {"conversation in the log already": 1}


def test_one_call_that_two_traces_tell_of_is_one() -> None:
    first, second = (read_spans([a_span(1, a_call("q", "a", "r1"), trace=trace)]) for trace in TRACES[:2])
    made = Folded()
    made.took(first, 1)
    made.close(11)
    made.took(second, 12)
    made.close(30)
    assert len(made.bodies("model_call")) == 1
    later = read_spans([a_span(5000, a_call("other", "a", "r1"), trace=TRACES[2])])
    made.took(later, 40)  # a server that gives one id twice
    made.close(60)
    assert len(made.bodies("model_call")) == 2


def test_tenants_never_meet() -> None:
    spans = read_spans([a_span(1, a_call("q", "a", "r1") | {"gen_ai.conversation.id": "c"})])
    made = Folded()
    for tenant in ("one", "two"):
        made.took(spans, 1, tenant)
    made.close(20)
    assert {one.tenant for one in made.events} == {"one", "two"}
    assert len({one.kin.id for one in made.events}) == 2
    made.took(read_spans([an_evaluation(9, 1.0, trace="", **{"gen_ai.response.id": "r1"})]), 21, "three")
    assert made.bodies("reward") == []


def test_what_is_remembered_is_forgotten_in_time() -> None:
    made = whole(read_spans([a_span(1, a_call("q", "a", "r1"))]))
    made.took(read_spans([a_span(2, GEN_AI)]), 2 * MEMORY + 100 * SECOND)
    made.close(3 * MEMORY + 200 * SECOND)
    made.took([], 6 * MEMORY + 300 * SECOND)
    assert list(made.assembler.trajectories) == []
