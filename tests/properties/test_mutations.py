"""The laws have teeth: each protection taken away, some law fails."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from millrace.streams.dispatch import release_policies
from tests.support.histories import plan_of, run

SEEDS = range(60)


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def broken(**terms) -> str:
    """The message of the first history that breaks a law."""
    for seed in SEEDS:
        plan = replace(plan_of(seed), release="reserve")
        try:
            run(seed, plan=plan, **terms)
        except AssertionError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_with_every_protection_no_law_is_broken():
    assert broken() == ""


@pytest.mark.slow
def test_without_the_guard_for_batches_nobody_waits_for_groups_are_held_forever(monkeypatch):
    monkeypatch.setattr(release_policies, "binding", lambda book, deadline: range(deadline))
    assert broken().startswith("P9")


@pytest.mark.slow
def test_without_any_guard_a_granted_group_misses_its_batch(monkeypatch):
    monkeypatch.setattr(release_policies, "binding", lambda book, deadline: ())
    assert broken().startswith(("P1", "P2"))


@pytest.mark.slow
def test_without_admission_too_much_is_granted(monkeypatch):
    monkeypatch.setattr(
        "millrace.streams.dispatch.stage.may_grant", lambda book, rules, schedule: book.outstanding < 40
    )
    assert broken().startswith("P1")


@pytest.mark.slow
def test_without_the_fence_zombies_commit():
    assert broken(fencing=False) != ""


@pytest.mark.slow
def test_without_marks_what_is_sent_twice_counts_twice():
    assert broken(skip_duplicates=False) != ""
