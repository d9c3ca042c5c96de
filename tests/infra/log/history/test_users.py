"""No record that lies where it does not belong ends a reading: report, status and why go on past any of them."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.consumers.tell.command import explain_in
from millrace.consumers.tell.status import StatusWatch
from millrace.consumers.tell.summary import Summary, summary
from millrace.consumers.tell.topics import PolicyTopics
from millrace.infra.log.base import Outgoing, Record
from millrace.infra.log.history.kinds import HOLDS
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas import codec
from tests.support.history import History
from tests.support.history_log import NS
from tests.support.history_records import POLICY


@cache
def world() -> History:
    return History(2)


@cache
def subjects() -> tuple[str, ...]:
    """What is asked about: something of a sample that trained, a ticket, and nothing that exists."""
    sample = next(row for _, row in world().rows("trajectories") if row["ticket"] is not None)
    return (sample["id"], sample["group"], str(sample["ticket"]), "never heard of")


def seen(bus: MemoryBus) -> tuple[Summary, tuple[str, ...], object]:
    """What report, why and status make of a log."""
    with_status = StatusWatch(bus, NS, POLICY)
    with_status.catch_up()
    shown = (with_status.versions, with_status.resolved, with_status.workers, with_status.ready, with_status.in_force)
    with_status.close()
    told = tuple(explain_in(PolicyTopics(bus, NS, POLICY), wanted).text for wanted in subjects())
    return summary(bus, NS, POLICY, world().now), told, shown


@cache
def undisturbed() -> object:
    summed, told, shown = seen(world().copy().bus)
    return repr((summed, told, shown))


def foreign(kind: str) -> list[bytes | None]:
    """What no topic of this kind holds: one record of every other, bytes that are none, and nothing."""
    others = {codec.name_of(record.value or b""): record.value for other in HOLDS for record in records(other)}
    return [value for name, value in others.items() if name not in HOLDS[kind]] + [b"", b"\xc3\x01torn", None]


def records(kind: str) -> list[Record]:
    if kind in ("workers", "decisions"):
        return []
    return [record for record, _ in world().rows(kind)]


@pytest.mark.parametrize("kind", ["weights", "ledger", "resolutions", "grants", "completions", "prompts", "workers"])
def test_what_does_not_belong_is_left_out(kind: str) -> None:
    copy = world().copy()
    with copy.bus.publisher() as publisher:
        for value in foreign(kind):
            publisher.publish(Outgoing(copy.topic(kind), b"k", value, {}, 0)).result()
    assert repr(seen(copy.bus)) == undisturbed()


@pytest.mark.slow
@settings(max_examples=30)  # each reads a whole history three times over
@given(st.lists(st.tuples(st.sampled_from(sorted(HOLDS)), st.integers(0, 99), st.integers(0, 1)), max_size=6))
def test_nothing_that_lies_anywhere_ends_a_reading(odd: list[tuple[str, int, int]]) -> None:
    copy = world().copy()
    count = copy.bus.partitions
    with copy.bus.publisher() as publisher:
        for kind, which, partition in odd:
            values, topic = foreign(kind), copy.topic(kind)
            at = partition % count(topic)
            publisher.publish(Outgoing(topic, b"k", values[which % len(values)], {}, at)).result()
    seen(copy.bus)
