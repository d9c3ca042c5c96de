"""What the laws ask of weight events that name another policy, or a selection, and of the ledger of a branch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.laws.versions import Tiles, Versions
from millrace.consumers.audit.laws.weights import Weights
from millrace.infra.log.base import Record
from millrace.infra.log.history.rows import Row
from millrace.trainers.offline.order import ItemOrder

Entry = dict[str, Any]
Forgery = Callable[[list[Entry]], None]

PLACES = 4
SOURCE = "n.p.trajectories"
SEED = next(seed for seed in range(99) if [ItemOrder(2, 1, seed).items(step) for step in (0, 1)] == [[1], [0]])
"""with which the second item of the selection is trained before the first"""
DIGEST = hashlib.sha256("".join(f"{SOURCE}/0@{offset}\n" for offset in (2, 3, 0, 1)).encode()).hexdigest()


def place(offset: int, topic: str = SOURCE) -> dict[str, Any]:
    return {"topic": topic, "partition": 0, "offset": offset}


def group(*offsets: int) -> Entry:
    """A group of a branch, of samples at these offsets."""
    places = [place(at) for at in offsets]
    return {"seq": -1, "ticket": None, "group": f"g{offsets}", "trajectories": places, "lost": None, "cell": 0}


def entries() -> list[Entry]:
    """A branch of three versions, the last of which trains again what the first did."""
    trained = [[], [group(0, 1)], [group(2, 3)], [group(0, 1)]]
    config = json.dumps({"branch": {"batch": 1, "seed": SEED}})
    return [
        {"version": n, "seq_lo": 0, "seq_hi": 0, "groups": groups, "config": config} for n, groups in enumerate(trained)
    ]


def takes_of_the_order(ledger: list[Entry]) -> None:
    ledger[2]["seq_hi"] = ledger[3]["seq_lo"] = ledger[3]["seq_hi"] = 2


def names_a_seq(ledger: list[Entry]) -> None:
    ledger[2]["groups"][0]["seq"] = 0


def names_nothing(ledger: list[Entry]) -> None:
    ledger[2]["groups"] = []


def names_a_group_without_places(ledger: list[Entry]) -> None:
    ledger[2]["groups"][0]["trajectories"] = []


def names_another_policy(ledger: list[Entry]) -> None:
    ledger[2]["groups"][0]["trajectories"] = [place(2, "n.q.trajectories")]


def names_an_evaluation(ledger: list[Entry]) -> None:
    ledger[2]["groups"][0]["trajectories"] = [place(2, "n.p.evaluations")]


def names_its_own_topic(ledger: list[Entry]) -> None:
    ledger[2]["groups"][0]["trajectories"] = [place(2, "n.b.trajectories")]


def names_more_than_was_selected(ledger: list[Entry]) -> None:
    ledger[3]["groups"].append(group(4))


def names_another_place(ledger: list[Entry]) -> None:
    ledger[2]["groups"][0]["trajectories"][1] = place(4)


def names_its_places_in_another_order(ledger: list[Entry]) -> None:
    ledger[2]["groups"][0]["trajectories"].reverse()


def names_its_groups_in_another_order(ledger: list[Entry]) -> None:
    ledger[1]["groups"], ledger[2]["groups"] = ledger[2]["groups"], ledger[1]["groups"]


def is_left_out(ledger: list[Entry]) -> None:
    del ledger[2]


BROKEN: list[tuple[Forgery, str]] = [
    (takes_of_the_order, "takes seqs 0 to 2 of the order"),
    (names_a_seq, "all of them under no seq"),
    (names_nothing, "does not name the places"),
    (names_a_group_without_places, "does not name the places"),
    (names_another_policy, "no trajectory of p"),
    (names_an_evaluation, "no trajectory of p"),
    (names_its_own_topic, "no trajectory of p"),
    (names_more_than_was_selected, "name 5 places of a selection of 4"),
    (names_another_place, "other places than their selection's digest says"),
    (names_its_places_in_another_order, "other places than their selection's digest says"),
    (names_its_groups_in_another_order, "other places than their selection's digest says"),
    (is_left_out, "follows 1"),
]


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


def tiled(ledger: list[dict[str, Any]], digest: str = DIGEST) -> list[str]:
    """What `tiles` says of the ledger of a branch."""
    topics = {"weights": "n.b.weights", "trajectories": "n.b.trajectories", "ledger": "n.b.ledger"}
    facts = Facts("b", topics, {"weights": {0: 0}, "ledger": {0: 0}}, "reserve", lambda kind: None)
    law = Tiles(facts)
    whole = SELECTED | {"selection_places": PLACES, "selection_digest": digest}
    for version in range(4):
        value = event(version, **(whole if version else {}))
        facts.weights(Row(Record("n.b.weights", 0, version, b"b", b"", {}, 0), "WeightVersion", value, b"", "weights"))
    for at, value in enumerate(ledger):
        law.ledger(Row(Record("n.b.ledger", 0, at, b"", b"", {}, 0), "LedgerEntry", value, b"", "ledger"))
    law.finish()
    found = law.finding
    return [violation.message for violation in found.violations] + [f"note: {note}" for note in found.notes]


def test_a_branch_takes_nothing_of_the_order_and_names_places_of_its_source() -> None:
    assert tiled(entries()) == []


def test_a_forged_selection_is_named_by_its_digest() -> None:
    assert tiled(entries(), "b" * 64) == [
        "versions up to 3 were trained on other places than their selection's digest says"
    ]


def test_what_cannot_be_taken_anew_is_noted_and_no_violation() -> None:
    ledger = entries()
    assert tiled(ledger[:2], "b" * 64) == [
        "note: 2 of 4 places of the selection were trained, so its digest cannot be taken anew"
    ]
    for entry in ledger:
        entry["config"] = ""
    (said,) = tiled(ledger)
    assert said.startswith("note: nothing says in which order")


@pytest.mark.parametrize(("forgery", "words"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_each_forgery_of_its_ledger_is_named(forgery: Forgery, words: str) -> None:
    ledger = entries()
    forgery(ledger)
    found = tiled(ledger)
    assert any(words in message for message in found), found
