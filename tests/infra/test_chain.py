"""The chain's link depends on each of its parts and on nothing else."""

from __future__ import annotations

import pytest

from infra.chain import START, event_hash

EVENT = {"id": "e1", "kind": "model_call", "trajectory": "t1", "step": 3, "body": b"\x00body", "tenant": "acme"}


def test_the_link_is_a_known_value():
    assert event_hash(START, EVENT).hex() == "6bfa76379ac78018c62ff8d0e763b095d829f505ee724a4af3aefb7afd6f3646"


@pytest.mark.parametrize(
    "change", [{"id": "e2"}, {"kind": "gap"}, {"trajectory": "t2"}, {"step": 4}, {"body": b"\x00bodz"}]
)
def test_every_covered_part_matters(change):
    assert event_hash(START, EVENT | change) != event_hash(START, EVENT)


def test_the_former_link_matters_and_other_fields_do_not():
    assert event_hash(b"x", EVENT) != event_hash(START, EVENT)
    assert event_hash(START, EVENT | {"tenant": "other"}) == event_hash(START, EVENT)


def test_parts_cannot_be_shifted_into_each_other():
    assert event_hash(START, EVENT | {"id": "e1m", "kind": "odel_call"}) != event_hash(START, EVENT)
