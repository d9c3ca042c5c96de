"""Flags become rules, rules leave out what they say, and what makes no sense is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.formats.exports.select import RewardLimit, Selection, VersionRange, from_flags, reward, versions
from millrace.infra.errors import ExportError


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("7", VersionRange(7, 7)),
        ("3..7", VersionRange(3, 7)),
        ("3..", VersionRange(3, None)),
        ("..7", VersionRange(None, 7)),
        (" 4 ", VersionRange(4, 4)),
    ],
)
def test_ranges_are_read_as_they_are_written(text: str, found: VersionRange) -> None:
    assert versions(text) == found


@pytest.mark.parametrize("text", ["", "..", "a", "7..3", "1.5", "-1", "1..2..3", "1 2", "."])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ExportError, match=r"write \d"):
        versions(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (">=0.5", RewardLimit(">=", 0.5)),
        ("<1", RewardLimit("<", 1.0)),
        ("0.25", RewardLimit("==", 0.25)),
        ("!= -1e-3", RewardLimit("!=", -0.001)),
    ],
)
def test_bounds_are_read_as_they_are_written(text: str, found: RewardLimit) -> None:
    assert reward(text) == found


@pytest.mark.parametrize("text", ["", ">", "nan", "=>1", "1..2", ">=x"])
def test_what_is_no_bound_is_refused(text: str) -> None:
    with pytest.raises(ExportError, match="quotes"):
        reward(text)


@given(st.sampled_from([">=", "<=", ">", "<", "==", "!="]), st.floats(-2, 2), st.none() | st.floats())
def test_a_missing_or_odd_reward_is_never_within_a_bound(sign: str, value: float, given: float | None) -> None:
    holds = RewardLimit(sign, value).holds(given)
    finite = given is not None and abs(given) < float("inf")
    assert holds == (finite and bool(eval(f"given {sign} value", {"given": given, "value": value})))


@given(st.integers(-1, 9), st.integers(0, 3), st.none() | st.integers(0, 9), st.none() | st.integers(0, 9))
def test_a_span_meets_a_range_where_they_share_a_version(
    head: int, more: int, first: int | None, last: int | None
) -> None:
    tail = head + more if head >= 0 else -1
    shared = {v for v in range(max(head, 0), tail + 1) if VersionRange(first, last).holds(v)} if head >= 0 else set()
    if first is None or last is None or first <= last:
        assert VersionRange(first, last).meets(head, tail) == bool(shared)


RECORD: dict[str, Any] = {"split": "train", "tenant": "a", "task_id": "t", "status": "completed", "reward": 0.5}
RECORD |= {"v_head": 2, "v_tail": 4}


@pytest.mark.parametrize(
    ("selection", "changes", "rule"),
    [
        (Selection(), {}, None),
        (Selection(), {"split": "evaluation"}, "evaluation"),
        (Selection(evaluation=True), {"split": "evaluation"}, None),
        (Selection(evaluation=True, train=False), {}, "split"),
        (Selection(tenants=frozenset("b")), {}, "tenant"),
        (Selection(tasks=frozenset("s")), {}, "task"),
        (Selection(statuses=frozenset({"failed"})), {}, "status"),
        (Selection(sampled=VersionRange(5, None)), {}, "version"),
        (Selection(sampled=VersionRange(4, 9)), {}, None),
        (Selection(trained=VersionRange(1, 3)), {}, "trained"),
        (Selection(trained=VersionRange(1, 8)), {}, None),
        (Selection(rewards=(RewardLimit(">", 0.5),)), {}, "reward"),
        (Selection(rewards=(RewardLimit(">", 0.1), RewardLimit("<", 0.6))), {}, None),
        (Selection(rewards=(RewardLimit("<", 0.6),)), {"reward": None}, "reward"),
    ],
)
def test_each_rule_leaves_out_what_it_says(selection: Selection, changes: dict[str, Any], rule: str | None) -> None:
    record: Any = {**RECORD, **changes}
    assert selection.leaves_out(record, 7) == rule
    assert Selection(trained=VersionRange(None, None)).leaves_out(record, None) is not None


def test_flags_that_make_no_sense_are_refused_with_the_choices() -> None:
    with pytest.raises(ExportError, match="train, evaluation, all"):
        from_flags("", "", [], [], "test", [], [], best=False)
    with pytest.raises(ExportError, match="completed, failed"):
        from_flags("", "", [], [], "all", [], ["done"], best=False)


def test_a_selection_says_itself_for_a_manifest() -> None:
    found = from_flags("3..", "", ["t"], [], "all", [">=0.5"], ["completed"], best=True).as_json()
    assert found == {
        "sampled": {"first": 3, "last": None},
        "tasks": ["t"],
        "statuses": ["completed"],
        "rewards": [">=0.5"],
        "evaluation": True,
        "train": True,
        "best": True,
    }
