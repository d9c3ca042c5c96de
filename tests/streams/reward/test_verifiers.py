"""What verifiers may say, and that each ends in time."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.errors import RewardError
from millrace.streams.reward.pool import Pool
from millrace.streams.reward.verifiers import exact, load, mathematics


@pytest.mark.parametrize(
    ("task", "output", "value"),
    [
        ({"answer": "123"}, " 123\n", 1.0),
        ({"answer": "123"}, "124", 0.0),
        ({"answer": 42}, "42", 1.0),
        ({"answers": ["a", "b"]}, "b", 1.0),
        ({"answer": "123"}, "", 0.0),
    ],
)
def test_exact(task, output, value):
    assert exact(task, output, {}) == value


@pytest.mark.parametrize(
    ("answer", "output", "value"),
    [("1/2", "the result is $0.5$", 1.0), ("1/2", "$\\frac{1}{3}$", 0.0), ("x+1", "so $1+x$", 1.0), ("7", "", 0.0)],
)
def test_mathematics(answer, output, value):
    assert mathematics({"answer": answer}, output, {}) == value


@given(
    answer=st.integers(-999, 999),
    other=st.integers(-999, 999),
    link=st.sampled_from([" or ", ", or ", ", maybe ", " or perhaps "]),
    end=st.sampled_from(["", ".", "?\n"]),
)
def test_a_choice_between_two_numbers_is_no_answer(answer: int, other: int, link: str, end: str) -> None:
    for one, two in ((answer, other), (other, answer)):
        paid = mathematics({"answer": str(answer)}, f"It is {one}{link}{two}{end}", {})
        assert paid == float(answer == other)


@pytest.mark.parametrize(
    "name",
    [
        "nonsense",
        "",
        "no_such_module:f",
        "tests.streams.reward.judges:nothing",
        "tests.streams.reward.judges:NOT_A_FUNCTION",
    ],
)
def test_a_verifier_that_is_none_is_said_at_once(name):
    with pytest.raises(RewardError):
        load(name)


@pytest.fixture(scope="module")
def pool():
    made = Pool("tests.streams.reward.judges:moody", timeout_s=6.0)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("output", "failure"),
    [
        ("die", "crash"),
        ("hang", "timeout"),
        ("raise", "error: KeyError"),
        ("nan", "error: ValueError"),
        ("text", "error: ValueError"),
        ("nothing", "error: ValueError"),
        ("odd", "error: ValueError"),
        ("sure", "error: ValueError"),
        ("signal", "error: ValueError"),
    ],
)
async def test_a_verifier_that_fails_is_a_labelled_failure_and_costs_one_verdict(pool, output, failure):
    verdict = await pool.judge("{}", output, {})
    assert (verdict.value, verdict.failure) == (None, failure)
    assert (await pool.judge("{}", "fine", {})).value == 1.0


@pytest.mark.slow
async def test_a_task_that_is_no_json_is_a_labelled_failure(pool):
    assert (await pool.judge("not json", "fine", {})).failure == "error: JSONDecodeError"


@pytest.mark.slow
async def test_a_verdict_may_have_parts():
    pool = Pool("tests.streams.reward.judges:parts")
    try:
        verdict = await pool.judge(json.dumps({}), "x", {"status": "completed"})
    finally:
        pool.close()
    assert verdict == (0.5, {"style": 1.0, "truth": 0.0}, "completed", "fine", None, 0.9, "process_reward")
