"""A ledger entry that fits its schema and was not written by a learner stops whoever would train on, in one line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from millrace.infra.errors import LedgerError
from millrace.infra.log.base import Outgoing
from millrace.infra.log.history.newest import head, older
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas import codec
from millrace.schemas.limits import beyond
from tests.support.odd import records
from tests.support.players import Plan, version_zero


def begun() -> tuple[MemoryBus, dict[str, Any]]:
    """A policy with version 0, and the ledger entry of it."""
    bus = MemoryBus({"n.p.weights": 1, "n.p.ledger": 1})
    event, entry = version_zero(Plan(None, 2, 1, 1, 1, "reserve", 0.0, "drop"))  # type: ignore[arg-type]
    put(bus, "n.p.weights", codec.encode_by_name("WeightVersion", event))
    put(bus, "n.p.ledger", codec.encode_by_name("LedgerEntry", entry))
    return bus, dict(entry)


def put(bus: MemoryBus, topic: str, value: bytes) -> None:
    bus.publisher().publish(Outgoing(topic, b"0", value)).result()


@settings(max_examples=30)
@given(records("LedgerEntry"))
def test_an_odd_entry_stops_in_one_line_or_is_passed_over(odd: dict[str, Any]) -> None:
    bus, _ = begun()
    put(bus, "n.p.ledger", codec.encode_by_name("LedgerEntry", odd))
    if beyond("LedgerEntry", odd) is not None:
        found = head(bus, "n.p.weights", "n.p.ledger", 0.0)
        assert found is not None
        assert found.version == 0
        return
    with pytest.raises(LedgerError, match="audit the policy") as stopped:
        head(bus, "n.p.weights", "n.p.ledger", 0.0)
    assert "\n" not in str(stopped.value)


def test_a_weight_event_that_the_ledger_does_not_name_hides_no_version() -> None:
    bus, entry = begun()
    known = head(bus, "n.p.weights", "n.p.ledger", 0.0)
    assert known is not None
    for other in ({"digest": "f" * 64}, {"version": 10**14}, {"version": 0, "digest": ""}):
        put(bus, "n.p.weights", codec.encode_by_name("WeightVersion", {**known.weights, **other}))
    assert head(bus, "n.p.weights", "n.p.ledger", 0.0) == known
    forged = codec.encode_by_name("LedgerEntry", {**entry, "digest": "f" * 64})
    put(bus, "n.p.ledger", forged)
    assert older(bus, "n.p.weights", "n.p.ledger", 0) == known, "an entry without the hash of its bytes is none"


def test_an_entry_with_one_other_figure_stops_too() -> None:
    bus, entry = begun()
    put(bus, "n.p.ledger", codec.encode_by_name("LedgerEntry", {**entry, "seq_hi": 7}))
    with pytest.raises(LedgerError, match="does not have the hash of its bytes: it was changed; audit the policy"):
        head(bus, "n.p.weights", "n.p.ledger", 0.0)
