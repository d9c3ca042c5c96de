"""What the laws ask of weight events that name another policy, or a selection, and of the ledger of a branch."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.laws.versions import Tiles, Versions
from millrace.consumers.audit.laws.weights import Weights
from millrace.infra.log.base import Record
from millrace.infra.log.history.rows import Row
from tests.support.corruptions import branches

SELECTED = {"selection": "SELECT 1", "selection_digest": "a" * 64, "selection_places": 9}
JUDGED = {"reward_source": "math", "reward_rubric": "v2"}
WRITTEN = {"text_replies": 7, "text_form": "template"}


def event(version: int, **fields: Any) -> dict[str, Any]:
    """A weight event of the branch `b`."""
    plain = {"policy": "b", "version": version, "parent": version - 1 if version else 7, "mode": "full", "uri": ""}
    plain |= {"digest": "d", "files": {}, "tokenizer_hash": "t", "template_hash": "c", "time": version}
    plain |= dict.fromkeys(("batch", "eta", "shards", "group_size", "delta", "delta_hash", "delta_bytes"))
    plain |= dict.fromkeys(("full_bytes", "broadcast", *SELECTED, *JUDGED, *WRITTEN))
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
    assert said(event(0), event(1, **SELECTED, **WRITTEN)) == []


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
        ([event(0), event(1, **WRITTEN)], "only in part"),
        ([event(0), event(1, **SELECTED, text_replies=7)], "text without its form"),
        ([event(0), event(1, **SELECTED, **WRITTEN | {"text_replies": 0})], "text without its form"),
        ([event(0), event(1, **SELECTED, **WRITTEN), event(2, **SELECTED)], "another selection"),
        ([event(0), event(1, **SELECTED | {"selection_places": 0})], "a selection of nothing"),
        ([event(0), event(1, **SELECTED | {"selection_digest": "short"})], "a selection of nothing"),
        ([event(0), event(1, **SELECTED), event(2, **SELECTED | {"selection_places": 8})], "another selection"),
        ([event(0), event(1, **SELECTED), event(2, **SELECTED, **JUDGED)], "another selection"),
    ],
)
def test_what_a_branch_may_not_say_is_named(broken: list[dict[str, Any]], words: str) -> None:
    assert [words in message for message in said(*broken)] == [True]


@pytest.mark.parametrize(("algorithm", "good"), [("sft", True), ("grpo", False), ("", False)])
def test_text_without_exact_tokens_is_imitated_and_nothing_else(algorithm: str, good: bool) -> None:
    facts = Facts("b", {"weights": "w", "trajectories": "t"}, {"weights": {0: 0}}, "reserve", lambda kind: None)
    law = Weights(facts)
    told = event(1, **SELECTED, **WRITTEN)
    config = json.dumps({"learner": {"algorithm": algorithm}}) if algorithm else ""
    entry = {"version": 1, "time": 1, "metrics": {}, "config": config}
    law.weights(Row(Record("w", 0, 1, b"b", b"", {}, 0), "WeightVersion", told, b"", "weights"))
    law.ledger(Row(Record("l", 0, 1, b"1", b"", {}, 0), "LedgerEntry", entry, b"", "ledger"))  # type: ignore[type-var]
    found = [violation.message for violation in law.finding.violations if "only sft may" in violation.message]
    assert bool(found) != good


def tiled(ledger: list[dict[str, Any]], digest: str = branches.DIGEST) -> list[str]:
    """What `tiles` says of the ledger of a branch."""
    topics = {"weights": "n.b.weights", "trajectories": "n.b.trajectories", "ledger": "n.b.ledger"}
    facts = Facts("b", topics, {"weights": {0: 0}, "ledger": {0: 0}}, "reserve", lambda kind: None)
    law = Tiles(facts)
    whole = SELECTED | {"selection_places": branches.PLACES, "selection_digest": digest}
    for version in range(4):
        value = event(version, **(whole if version else {}))
        facts.weights(Row(Record("n.b.weights", 0, version, b"b", b"", {}, 0), "WeightVersion", value, b"", "weights"))
    for at, value in enumerate(ledger):
        law.ledger(Row(Record("n.b.ledger", 0, at, b"", b"", {}, 0), "LedgerEntry", value, b"", "ledger"))
    law.finish()
    found = law.finding
    return [violation.message for violation in found.violations] + [f"note: {note}" for note in found.notes]


def test_a_branch_takes_nothing_of_the_order_and_names_places_of_its_source() -> None:
    assert tiled(branches.entries()) == []


def test_a_forged_selection_is_named_by_its_digest() -> None:
    assert tiled(branches.entries(), "b" * 64) == [
        "versions up to 3 were trained on other places than their selection's digest says"
    ]


def test_what_cannot_be_taken_anew_is_noted_and_no_violation() -> None:
    ledger = branches.entries()
    assert tiled(ledger[:2], "b" * 64) == [
        "note: 2 of 4 places of the selection were trained, so its digest cannot be taken anew"
    ]
    for entry in ledger:
        entry["config"] = ""
    (said,) = tiled(ledger)
    assert said.startswith("note: nothing says in which order")


@pytest.mark.parametrize(("forgery", "words"), branches.BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_each_forgery_of_its_ledger_is_named(forgery: branches.Forgery, words: str) -> None:
    ledger = branches.entries()
    forgery(ledger)
    found = tiled(ledger)
    assert any(words in message for message in found), found
