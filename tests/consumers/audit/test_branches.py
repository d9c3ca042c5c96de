"""What the laws ask of weight events that name another policy, or a selection."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.rows import Row
from millrace.consumers.audit.versions import Versions
from millrace.consumers.audit.weights import Weights
from millrace.infra.log.base import Record

SELECTED = {"selection": "SELECT 1", "selection_digest": "a" * 64, "selection_places": 9}
JUDGED = {"reward_source": "math", "reward_rubric": "v2"}


def event(version: int, **fields: Any) -> dict[str, Any]:
    """A weight event of the branch `b`."""
    plain = {"policy": "b", "version": version, "parent": version - 1 if version else 7, "mode": "full", "uri": ""}
    plain |= {"digest": "d", "files": {}, "tokenizer_hash": "t", "template_hash": "c", "time": version}
    plain |= dict.fromkeys(("batch", "eta", "shards", "group_size", "delta", "delta_hash", "delta_bytes"))
    plain |= dict.fromkeys(("full_bytes", "broadcast", *SELECTED, *JUDGED))
    return plain | {"parent_policy": None if version else "p"} | fields


def said(*events: dict[str, Any]) -> list[str]:
    """The violations of a few weight events, one after the other."""
    topics = {"weights": "n.b.weights", "trajectories": "n.b.trajectories"}
    facts = Facts("b", topics, {"weights": {0: 0}, "trajectories": {}}, "reserve", lambda kind: None)
    laws = (Versions(facts), Weights(facts))
    for at, value in enumerate(events):
        row = Row(Record("n.b.weights", 0, at, b"b", b"", {}, at), "WeightVersion", value, b"", "weights")
        for law in laws:
            law.weights(row)
    return [violation.message for law in laws for violation in law.finding.violations]


def test_a_branch_begins_at_a_version_of_another_policy_and_names_what_it_was_trained_on() -> None:
    trained = [event(n, **SELECTED, **JUDGED) for n in (1, 2)]
    assert said(event(0), *trained) == []
    assert said(event(0), event(1, **SELECTED), event(2)) == []


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ([event(0, parent=None)], "names no version of p"),
        ([event(0, parent=-1)], "names no version of p"),
        ([event(0, parent_policy=None, parent=None), event(1, **SELECTED)], "no branch"),
        ([event(0), event(1, **SELECTED, parent_policy="p")], "only version 0"),
        ([event(0), event(1, **SELECTED | {"selection_digest": None})], "only in part"),
        ([event(0), event(1, **SELECTED, reward_source="math")], "only in part"),
        ([event(0), event(1, **JUDGED)], "only in part"),
        ([event(0), event(1, **SELECTED | {"selection_places": 0})], "a selection of nothing"),
        ([event(0), event(1, **SELECTED | {"selection_digest": "short"})], "a selection of nothing"),
        ([event(0), event(1, **SELECTED), event(2, **SELECTED | {"selection_places": 8})], "another selection"),
        ([event(0), event(1, **SELECTED), event(2, **SELECTED, **JUDGED)], "another selection"),
    ],
)
def test_what_a_branch_may_not_say_is_named(broken: list[dict[str, Any]], words: str) -> None:
    assert [words in message for message in said(*broken)] == [True]
