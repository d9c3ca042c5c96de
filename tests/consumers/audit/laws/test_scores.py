"""The law about evaluations: whatever of one is altered is named."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from millrace.consumers.audit import audit
from tests.consumers.audit.corruptions import tally
from tests.consumers.audit.corruptions.generator import Generator
from tests.support.history import History
from tests.support.history_log import NS
from tests.support.history_records import POLICY
from tests.support.scored import evaluation
from tests.support.whole import whole

FIELDS = 40


@cache
def generator() -> Generator:
    return Generator(whole(0), ("scores",))


@pytest.mark.parametrize("seed", range(FIELDS))
def test_any_field_of_an_evaluation_that_is_altered_is_named(seed: int) -> None:
    broken, change = generator().change(seed)
    assert tally.named(broken) or change.listed in ("drop scores", "exchange scores"), str(change)


def messages(*more: dict[str, Any]) -> list[str]:
    """What the law says of a whole history with more evaluations."""
    h = History(0)
    for one in more:
        h.append("scores", "Evaluation", one, "" if one["version"] is None else str(one["version"]))
    finding = audit(h.bus, NS, POLICY).finding("scores")
    return [violation.message for violation in finding.violations]


def entry(version: int) -> dict[str, Any]:
    return next(row for _, row in History(0).rows("ledger") if row["version"] == version)


def about(**fields: Any) -> dict[str, Any]:
    return evaluation(POLICY, entry(2), **fields)


def test_evaluations_of_versions_of_models_and_while_versions_changed_are_in_order() -> None:
    nobody = {"version": None, "versions": [], "ledger_hash": None}
    unjudged = {"rewards": [[None, None]], "pass_at": {"1": 0.0}, "unfinished": 0}
    assert messages(about(time=6), about(**nobody), about(**nobody | {"versions": [1, 2], "digest": None})) == []
    assert messages(about(**unjudged)) == ["an evaluation says 0.0 for pass@1, which does not follow from its rewards"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mean": 0.9}, "says mean 0.9"),
        ({"mean": None}, "says mean None"),
        ({"standard_error": 0.01}, "says standard_error 0.01"),
        ({"pass_at": {"1": 0.9}}, "pass@1"),
        ({"pass_at": {"3": 0.5}}, "pass@3"),
        ({"unjudged": 0}, "without a verdict"),
        ({"unfinished": 99}, "cut off"),
        ({"questions": 5}, "says 5 tasks"),
        ({"samples": 3}, "with 3 answers each"),
        ({"versions": [1]}, "says that versions [1] answered"),
        ({"versions": [99]}, "names version 99, which nobody committed"),
        ({"digest": "0" * 64}, "another digest or ledger entry"),
        ({"ledger_hash": "0" * 64}, "another digest or ledger entry"),
        ({"version": None}, "names a ledger entry, but no version"),
        ({"policy": "another"}, "of another lies here"),
    ],
)
def test_what_does_not_follow_is_named_though_it_was_named_anew(fields: dict[str, Any], words: str) -> None:
    assert any(words in message for message in messages(about(**fields)))


def test_one_that_lies_there_twice_is_named() -> None:
    assert messages(about(), about()) == ["an evaluation lies there twice"]
