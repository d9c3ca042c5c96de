"""A grant that nobody can run is finished at once, and named: its lease ends it, and the next one runs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.infra.log.base import Record
from millrace.infra.log.memory.bus import MemoryBus
from millrace.producers.rollout.worker import FAR, Names, ResolvedTickets, RolloutWorker
from millrace.schemas import codec
from tests.producers.rollout.test_worker import grant
from tests.support.odd import DEEP, records


def worker() -> RolloutWorker:
    return RolloutWorker(MemoryBus(), Names("t", "p", "w"), None)  # type: ignore[arg-type]


def record(value: bytes, key: bytes = b"k") -> Record:
    return Record("t.p.grants", 0, 0, key, value, {}, 0)


@pytest.mark.parametrize(
    "over",
    [
        {"task": ""},
        {"task": "[]"},
        {"task": '"half'},
        {"task": DEEP * 50},
        {"samples": [3]},
        {"samples": [-1]},
        {"group_size": 2**31 - 1},
        {"ticket": -1},
    ],
)
def test_a_grant_that_nobody_can_run_is_finished(over: dict[str, Any]) -> None:
    it, odd = worker(), record(codec.encode("Grant", {**grant(5), **over}))
    it._read(odd)
    it._take(None, odd)  # type: ignore[arg-type]
    assert it.progress.position(0) == 1
    assert it._running == {}


@settings(suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_grant_is_taken_or_passed_over(data: st.DataObject) -> None:
    drawn: Any = data.draw(records("Grant"))
    worker()._grant(record(codec.encode("Grant", drawn)))
    worker()._grant(record(b"torn"))


@pytest.mark.parametrize("key", [b"", b"-1", b"9" * 5000, "٣".encode(), b"\xff"])
def test_a_key_that_is_no_ticket_stops_nobody(key: bytes) -> None:
    it, odd = worker(), record(codec.encode("Grant", {**grant(5), "task": ""}), key)
    it._read(odd)
    it._take(None, odd)  # type: ignore[arg-type]
    assert it.progress.position(0) == 1


def test_a_ticket_far_beyond_all_others_takes_no_memory() -> None:
    tickets = ResolvedTickets()
    assert tickets.add(9)
    assert not tickets.add(8 * FAR * 8)
    assert 9 in tickets
    assert 8 * FAR * 8 not in tickets
