"""Which decisions are held to what they were made with: those that Millrace made, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from millrace.infra.stages import decisions
from millrace.schemas import codec
from millrace.schemas.ids import new_id
from millrace.schemas.records import Decision
from tests.support.whole import Whole, whole

MADE = decisions.setting("another", "eta", 2, 5)


def holds(decision: Decision, key: bytes = b"another") -> bool:
    """Whether the audit of a history that holds one more decision, for another policy, finds its settings sound."""
    history = whole(0).copy()
    _add(history, decision, key)
    return history.audit(quick=True).finding("settings").holds


def _add(history: Whole, decision: Decision, key: bytes) -> None:
    last = list(history.records("decisions"))[-1]
    entries = history.bus.logs[last.topic][0].entries
    value = codec.encode("Decision", decision)
    entries.append(replace(last, offset=len(entries), key=key, value=value))


@pytest.mark.parametrize(
    "other",
    [
        {"policy": "a third"},
        {"name": "batch"},
        {"value": "3"},
        {"reason": "another"},
        {"author": "another"},
        {"time": 6},
        {"id": "another"},
        {"id": MADE["id"][:-1]},
    ],
    ids=str,
)
def test_a_decision_of_millrace_follows_from_what_it_says(other: dict[str, object]) -> None:
    assert holds(MADE)
    assert not holds(cast(Decision, MADE | other))


def test_a_decision_of_millrace_lies_under_its_policy() -> None:
    assert not holds(MADE, b"a third")


def test_decisions_of_older_releases_and_of_others_are_named_as_they_like() -> None:
    assert holds({**MADE, "id": new_id()}, b"")
    assert holds({**MADE, "id": "my own", "author": "ann"}, b"")


def test_two_decisions_of_one_moment_have_two_ids() -> None:
    assert decisions.setting("p", "eta", 2, 5)["id"] != decisions.setting("p", "batch", 2, 5)["id"]
    assert decisions.setting("p", "eta", 2, 5)["id"] != decisions.setting("p", "eta", 2, 6)["id"]
