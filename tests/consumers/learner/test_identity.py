from __future__ import annotations

from millrace.consumers.learner.agreement import client_id
from millrace.consumers.learner.identity import differing, identify, shown_by
from millrace.infra.config import load


def test_only_what_changes_training_changes_the_identity() -> None:
    plain = identify(load())
    assert identify(load(flags={"learner.keep": 9, "learner.host": "10.0.0.1", "learner.max_versions": 3})) == plain
    assert identify(load(flags={"learner.lr": 1e-3})).config != plain.config
    assert identify(load(flags={"learner.backend": "torch:t2"})).config != plain.config
    assert identify(load(flags={"policy.release": "soft"})).config != plain.config


def test_a_member_shows_it_in_its_client_id() -> None:
    shown = identify(load()).shown
    assert shown_by(client_id(f"learner/{shown}", "127.0.0.1", 5)) == shown


def test_the_one_that_differs_is_named_with_what_it_differs_in() -> None:
    assert differing(["a-b-c", "a-b-c"], "") == {}
    assert differing(["a-b-c", "x-b-c"], "") == {1: "configuration"}
    assert differing(["a-b-c", "a-x-y"], "") == {1: "code and libraries"}
    assert differing([], "a-b-c") == {}


def test_the_ledger_decides_who_is_right_where_somebody_has_its_identity() -> None:
    assert differing(["x-b-c", "a-b-c"], "a-b-c") == {0: "configuration"}
    assert differing(["x-b-c", "x-b-c"], "a-b-c") == {}


APART = ("torch[actor]:d4+torch[critic]:d1", "torch[critic]:d1+torch[actor]:d2")


def test_how_many_share_a_batch_is_no_difference() -> None:
    for one, two in (("torch", "fsdp:d4"), ("torch:t2", "torch:d3t2"), ("torch:d2e2", "torch:d4e2"), APART):
        assert identify(load(flags={"learner.backend": one})) == identify(load(flags={"learner.backend": two}))
