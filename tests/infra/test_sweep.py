"""Sweeping: what no record refers to any more goes, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.bus.base import Outgoing, TopicSpec
from infra.bus.memory import MemoryBus
from infra.claims import ClaimStore
from infra.errors import ClaimError, TopicError
from infra.sweep import Swept, sweep
from schemas import codec

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
