"""Which judgements count: nobody can speak for, replace, forestall or crowd out a source that is awaited."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.schemas import bounds
from millrace.streams.seal.rewards import OUT_OF_BOUNDS, Judgements, combine, sealed_rewards, silent_sources, take

AWAITED = ("verifier", "style")
PLACE = {"topic": "t", "partition": 0, "offset": 0}


def body(source: str, value: float | None, id: str, **fields: Any) -> dict[str, Any]:
    plain = {"target_kind": "trajectory", "target": "r1", "rubric_version": "1", "failure": None, "supersedes": None}
    return {**plain, "reward_id": id, "source": source, "value": value, **fields}


def folded(bodies: list[dict[str, Any]]) -> Judgements:
    counted: Judgements = {}
    for one in bodies:
        counted = take(counted, one, PLACE, AWAITED).judgements
    return counted


# The ids, targets and rubrics of others, too: a reward role's ids follow from what it judges, so anyone can know them.
NAMES = st.sampled_from(["a", "b", "c"])
SPOKEN = st.builds(
    body,
    st.sampled_from([*AWAITED, "agent", "user"]),
    st.sampled_from([None, 0.0, 1.0, -2.5, 1e6, 1e30, math.inf, math.nan]),
    NAMES,
    target_kind=st.sampled_from(["trajectory", "group", "turn"]),
    target=st.sampled_from(["r1", "r2"]),
    rubric_version=st.sampled_from(["1", "2"]),
    supersedes=st.none() | NAMES,
)


@given(st.lists(SPOKEN, max_size=12), st.booleans())
def test_what_others_say_changes_nothing_that_is_awaited(said: list[dict[str, Any]], partial: bool) -> None:
    alone, among = folded([one for one in said if one["source"] in AWAITED]), folded(said)
    assert combine(AWAITED, alone, partial=partial) == combine(AWAITED, among, partial=partial)
    assert silent_sources(AWAITED, alone) == silent_sources(AWAITED, among)
    mine = [one for one in sealed_rewards(among) if one["source"] in AWAITED]
    assert mine == sealed_rewards(alone)


@given(st.lists(SPOKEN, max_size=12))
def test_every_reward_is_a_number_within_bounds_or_a_failure(said: list[dict[str, Any]]) -> None:
    for one in sealed_rewards(folded(said)):
        assert (one["value"] is None) == (one["failure"] is not None)
        assert one["value"] is None or abs(one["value"]) <= bounds.REWARD


def test_a_number_beyond_the_bounds_is_a_labelled_failure() -> None:
    (one,) = sealed_rewards(folded([body("verifier", 1e30, "a")]))
    assert (one["value"], one["failure"]) == (None, OUT_OF_BOUNDS)


def test_a_source_corrects_itself_only() -> None:
    counted = folded([body("verifier", 1.0, "a"), body("agent", 0.0, "b", supersedes="a")])
    assert [one["value"] for one in sealed_rewards(counted)] == [1.0, 0.0]
    taken = take(counted, body("verifier", 0.5, "c", supersedes="a"), PLACE, AWAITED)
    assert taken.former is not None
    assert taken.former["reward_id"] == "a"


@pytest.mark.parametrize("awaited", [True, False])
def test_room_for_those_who_are_awaited_is_theirs_alone(awaited: bool) -> None:
    others = [body("agent" if awaited else "verifier", 0.0, f"{n}", target=f"{n}") for n in range(bounds.REWARDS + 1)]
    counted = folded(others)
    assert len(counted) == bounds.REWARDS
    assert take(counted, others[-1], PLACE, AWAITED).refusal == "too_many_rewards"
    assert take(counted, body("verifier" if awaited else "agent", 1.0, "v"), PLACE, AWAITED).refusal is None


def test_without_anyone_awaited_all_values_add_up() -> None:
    counted = folded([body("agent", 0.25, "a"), body("user", 0.5, "b")])
    assert combine((), counted) == 0.75
    assert combine((), {}) is None
