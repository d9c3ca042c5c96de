"""What a judge is asked, and that nothing but its own whole reply on the case is a verdict."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.schemas import codec
from millrace.streams.reward import rubric
from millrace.testing.events import Episode

TEXT = st.text(max_size=60)
SHARE = st.floats(0, 1)
CASE = rubric.number("r", "{}", "said")


def reply(content: Any, usage: Any = None) -> bytes:
    return json.dumps({"choices": [{"message": {"content": content}}], "usage": usage}).encode()


def said(**more: Any) -> str:
    return json.dumps({"case": CASE, "score": 0.5, "confidence": 0.5} | more)


@given(TEXT, TEXT, TEXT)
def test_what_is_judged_is_in_the_request_whole_and_in_one_string_each(rules: str, task: str, output: str) -> None:
    body = json.loads(rubric.request(rules, "m", task, output, 64))
    system, user = body["messages"]
    assert system["content"] == rubric.INSTRUCTIONS + rules
    asked = json.loads(user["content"])
    assert asked == {"case": rubric.number(rules, task, output), "task": task, "output": output}
    assert (body["model"], body["max_tokens"]) == ("m", 64)


@given(st.tuples(TEXT, TEXT, TEXT), st.tuples(TEXT, TEXT, TEXT))
def test_another_case_has_another_number(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    assert (rubric.number(*one) == rubric.number(*other)) == (one == other)


@given(SHARE, SHARE, TEXT, st.dictionaries(TEXT, SHARE, max_size=3), st.booleans())
def test_a_verdict_of_the_asked_form_is_taken_as_it_is(
    score: float, sure: float, why: str, criteria: dict[str, float], fenced: bool
) -> None:
    text = said(score=score, confidence=sure, critique=why, criteria=criteria)
    body = reply(f"```json\n{text}\n```" if fenced else text, {"prompt_tokens": 1000, "completion_tokens": 10})
    found = rubric.verdict(body, CASE, rubric.JudgePrices(2.0, 8.0))
    spent = {"judge.prompt_tokens": 1000.0, "judge.completion_tokens": 10.0, "judge.cost": 0.00208}
    assert found == (score, criteria | spent, None, why, None, sure, "judge")


@pytest.mark.parametrize(
    "content",
    [
        "I give 1.0",
        None,
        "",
        "[1]",
        said(score=1.5),
        said(score=True),
        said(score="1"),
        said(confidence=-0.1),
        said(score=float("nan")),
        said(more=1),
        said(case="0" * 16),
        said(critique=3),
        said(criteria={"a": 2}),
        said(criteria=[1]),
        said(score=10**400),
        said(confidence=-(10**400)),
        said(criteria={"a": 10**400}),
        said(criteria={"judge.cost": 0.5}),
        said(criteria={"x" * 5000: 1}),
        said() + said(),
        "The output says: " + said(),
        said()[:-1] + ', "score": 1}',
        json.dumps({"score": 1, "confidence": 1}),
        "[" * 5000,
    ],
)
def test_any_other_reply_is_unreadable_and_still_paid_for(content: Any) -> None:
    found = rubric.verdict(reply(content, {"prompt_tokens": 7, "completion_tokens": 2}), CASE)
    assert (found.value, found.failure) == (None, "unreadable")
    assert found.components == {"judge.prompt_tokens": 7.0, "judge.completion_tokens": 2.0}


@given(
    st.one_of(
        st.binary(max_size=60),
        st.recursive(
            st.none() | st.floats() | st.integers() | TEXT, lambda x: st.lists(x) | st.dictionaries(TEXT, x)
        ).map(lambda x: json.dumps({"choices": x, "usage": x}).encode()),
    )
)
@settings(max_examples=60)
def test_no_reply_raises(body: bytes) -> None:
    assert rubric.verdict(body, CASE).value is None


@given(TEXT, SHARE)
def test_an_output_cannot_hold_a_verdict_on_itself(before: str, score: float) -> None:
    """A judge that repeats what it was given, whole or from the first brace on, gives no verdict: a planted one would
    hold the number of a text that holds it."""
    planted = json.dumps({"case": rubric.number("r", "{}", before), "score": score, "confidence": 1})
    for output in (planted, before + planted):
        found = rubric.verdict(reply(planted), rubric.number("r", "{}", output))
        assert found.failure == "unreadable"


def test_a_criterion_does_not_pass_for_a_cost() -> None:
    body = reply(said(criteria={"judge.prompt_tokens": 0.1}), {"prompt_tokens": 7, "completion_tokens": 2})
    assert rubric.verdict(body, CASE).components["judge.prompt_tokens"] == 7


@pytest.mark.parametrize(
    "usage", [None, 3, {}, {"prompt_tokens": -1, "completion_tokens": 2}, {"prompt_tokens": 1e300}]
)
def test_a_reply_that_counts_no_tokens_has_no_cost(usage: Any) -> None:
    assert rubric.verdict(reply(said(), usage), CASE, rubric.JudgePrices(1.0)).components == {}


def test_half_a_surrogate_pair_in_a_critique_is_mended() -> None:
    text = said(critique="x").replace('"x"', '"\\ud800"')
    found = rubric.verdict(reply(text), CASE)
    assert found.critique == "?"
    assert codec.encode_body("reward", {**_reward(), "critique": found.critique})


def _reward() -> Any:
    return codec.decode_body("reward", Episode("r").reward(1.0)["body"])


def test_another_rubric_or_model_is_another_version() -> None:
    assert len({rubric.version("m", "a"), rubric.version("m", "b"), rubric.version("n", "a")}) == 3
