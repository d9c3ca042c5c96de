"""The one sentence, for stories that a whole history rarely has."""

from __future__ import annotations

from typing import Any, cast

from millrace.consumers.tell.story import Passage, Story, verdict
from millrace.consumers.tell.subject import Subject
from millrace.infra.log.history.rows import Row

SUBJECT = Subject("s", "session", "g", "local/g", None, "s")


def row(**fields: Any) -> Row:
    return cast(Row, fields)


def passage(kind: str, *letters: dict[str, Any]) -> Passage:
    event = row(id=kind, kind=kind, governance=None)
    return Passage(event, event, letters=[cast(Row, letter) for letter in letters])


def letter(reason: str, detail: str = "") -> dict[str, Any]:
    return {"stage": "seal", "reason": reason, "detail": detail}


def sample(**fields: Any) -> Row:
    known = {"id": "s", "split": "train", "reward": 1.0, "missing": [], "rewards": [], "tokens": [1], "excluded": []}
    return row(**known | {"ticket": None} | fields)


def test_a_group_that_was_closed_without_a_sample_is_not_waited_for() -> None:
    closed = letter("superseded", "its group was closed without it")
    story = Story(SUBJECT, passages=[passage("episode_started", closed)])
    assert verdict(story) == "its group was closed without a sample: superseded (its group was closed without it)"
    assert "is not complete yet" in verdict(Story(SUBJECT, passages=[passage("episode_started")]))


def test_a_sample_that_is_not_fit_says_why() -> None:
    story = Story(Subject("g", "group", "g", "local/g"), samples=[sample(reward=None, missing=["user"])])
    assert verdict(story) == (
        "group g was sealed, and is not fit to train: it was sealed without a reward (user said nothing in time) and "
        "does not train"
    )


def test_the_failure_of_a_verifier_is_named() -> None:
    failed = {"source": "verifier", "failure": "no_task"}
    story = Story(SUBJECT, samples=[sample(reward=None, missing=["verifier"], rewards=[failed])])
    assert "(verifier failed: no_task)" in verdict(story)


def test_a_reward_that_came_too_late_is_mentioned() -> None:
    late = passage("reward", letter("late_reward"))
    story = Story(SUBJECT, passages=[late], samples=[sample(reward=None, missing=["user"])])
    assert verdict(story).endswith("; 1 reward came after it was sealed and changed nothing")
