"""Sweeping: what no record refers to any more goes, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.infra.errors import ClaimError, TopicError, UnreachableError
from millrace.infra.log.base import Outgoing, Record, TopicSpec
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.log.sweep import Sweeper, Sweeping, Swept, sweep
from millrace.schemas import codec

NOW = -3600.0
"""a patience by which everything is old"""


@pytest.fixture
def bus() -> MemoryBus:
    bus = MemoryBus()
    bus.ensure_topics(
        [TopicSpec(name, 2) for name in ("ns.raw", "ns.p.trajectories", "ns.changelog.seal", "other.raw")]
    )
    return bus


def carried(bus: MemoryBus, store: ClaimStore, topic: str, data: bytes, partition: int = 0) -> dict[str, object]:
    claim = store.store("Event", data)
    value = codec.encode("Claim", claim)
    bus.publisher().publish(Outgoing(topic, b"k", value, {}, partition)).result()
    return claim


def test_only_what_no_record_carries_goes(bus: MemoryBus, tmp_path: Path) -> None:
    store = ClaimStore(str(tmp_path))
    bus.publisher().publish(Outgoing("ns.changelog.seal", b"k", b"no avro", {}, 0)).result()
    bus.publisher().publish(Outgoing("ns.changelog.seal", b"k", None, {}, 0)).result()
    kept = [carried(bus, store, "ns.raw", b"first", 1), carried(bus, store, "ns.p.trajectories", b"second")]
    gone = store.store("Event", b"nobody's")
    assert sweep(bus, "ns", store, NOW) == Swept(3, 1, len(b"nobody's"))
    assert [store.load(claim) for claim in kept] == [b"first", b"second"]
    with pytest.raises(ClaimError):
        store.load(gone)
    assert sweep(bus, "ns", store, NOW) == Swept(2, 0, 0)


def test_what_the_topic_has_forgotten_goes_and_what_is_young_stays(bus: MemoryBus, tmp_path: Path) -> None:
    store = ClaimStore(str(tmp_path))
    claim = carried(bus, store, "ns.raw", b"captured")
    bus.delete_before("ns.raw", 0, 1)
    assert sweep(bus, "ns", store, 3600) == Swept(0, 0, 0)
    assert store.load(claim) == b"captured"
    assert sweep(bus, "ns", store, NOW).removed == 1


def test_again_and_again_reads_only_what_is_new_and_sees_what_went(
    bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ClaimStore(str(tmp_path))
    sweeper = Sweeper(bus, "ns", store, NOW)
    kept, gone = carried(bus, store, "ns.raw", b"kept", 1), carried(bus, store, "ns.raw", b"gone")
    assert sweeper.sweep() == Swept(2, 0, 0)
    bus.delete_before("ns.raw", 0, 1)
    again = carried(bus, store, "ns.p.trajectories", b"later")
    read: list[tuple[str, int]] = []
    whole = bus.read

    def watched(topic: str, partition: int, start: int = 0, end: int | None = None) -> Iterator[Record]:
        for record in whole(topic, partition, start, end):
            read.append((topic, record.offset))
            yield record

    monkeypatch.setattr(bus, "read", watched)
    assert sweeper.sweep() == Swept(3, 1, len(b"gone"))
    assert read == [("ns.p.trajectories", 0)]
    assert [store.load(claim) for claim in (kept, again)] == [b"kept", b"later"]
    with pytest.raises(ClaimError):
        store.load(gone)


def test_a_role_sweeps_by_itself_and_goes_on_after_the_log_was_away(tmp_path: Path) -> None:
    bus, store, tries = MemoryBus(), ClaimStore(str(tmp_path)), iter([UnreachableError("away")])
    bus.ensure_topics([TopicSpec("ns.raw", 1)])
    store.store("Event", b"nobody's")

    def connect() -> MemoryBus:
        for error in tries:
            raise error
        return bus

    with Sweeping(connect, "ns", store, patience_s=NOW, interval_s=0.01):
        deadline = time.monotonic() + 60
        while list(store.older(time.time() + 60)) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert list(store.older(time.time() + 60)) == []


def test_another_namespace_vouches_for_nothing(bus: MemoryBus, tmp_path: Path) -> None:
    store = ClaimStore(str(tmp_path))
    carried(bus, store, "other.raw", b"elsewhere")
    assert sweep(bus, "ns", store, NOW).removed == 1


def test_a_log_that_cannot_be_read_removes_nothing(
    bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ClaimStore(str(tmp_path))
    claim = store.store("Event", b"nobody's")

    def refuse(*_: object) -> None:
        raise TopicError("not now")

    monkeypatch.setattr(bus, "read", refuse)
    with pytest.raises(TopicError):
        sweep(bus, "ns", store, NOW)
    assert store.load(claim) == b"nobody's"
