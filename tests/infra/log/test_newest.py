"""The last records of a partition, found from its end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.log import newest
from millrace.infra.log.base import Outgoing, Record
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.log.newest import last, newest_first


def filled(kept: list[bool], start: int = 0) -> MemoryBus:
    """A topic with a record at every offset that is kept, a hole elsewhere, and nothing before `start`."""
    bus = MemoryBus({"t": 1})
    for number in range(len(kept)):
        bus.publisher().publish(Outgoing("t", b"k", str(number).encode())).result()
    entries = bus.logs["t"][0].entries
    entries[:] = [record if keep else None for record, keep in zip(entries, kept, strict=True)]
    bus.delete_before("t", 0, start)
    return bus


@given(st.lists(st.booleans(), max_size=300), st.integers(0, 300))
def test_it_is_reading_backwards(kept: list[bool], start: int) -> None:
    bus = filled(kept, start)
    assert list(newest_first(bus, "t")) == list(bus.read("t", 0))[::-1]


def test_only_what_lies_behind_the_wanted_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newest, "WIDEST", 128)
    bus = filled([True] * 2000)
    read, spans = bus.read, list[tuple[int, int]]()

    def counted(topic: str, partition: int, start: int = 0, end: int | None = None) -> Iterator[Record]:
        spans.append((start, end or 0))
        return read(topic, partition, start, end)

    monkeypatch.setattr(bus, "read", counted)
    found = last(bus, "t", lambda record: record.offset <= 1700)
    assert found is not None
    assert found.offset == 1700
    assert spans == [(1936, 2000), (1808, 1936), (1680, 1808)]
    assert last(bus, "t", lambda record: False) is None


def test_an_empty_topic_has_no_last_record() -> None:
    assert last(MemoryBus({"t": 1}), "t") is None
