"""The forwarder: order, restarts, claims, an unreachable log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.bus.base import TopicSpec
from infra.bus.memory import MemoryBus
from infra.claims import ClaimStore
from infra.errors import UnreachableError
from producers.capture.entry import Entry
from producers.capture.forwarder import Forwarder
from producers.capture.log import CaptureLog
from schemas import codec

TOPIC = "t.raw"


@pytest.fixture
def bus() -> MemoryBus:
    bus = MemoryBus()
    bus.ensure_topics([TopicSpec(TOPIC, 2)])
    return bus


@pytest.fixture
def log(tmp_path: Path) -> Iterator[CaptureLog]:
    log = CaptureLog(tmp_path / "log", segment_bytes=500)
    yield log
    log.close()


def put(log: CaptureLog, count: int, size: int = 20) -> None:
    for _ in range(count):
        seq = log.end
        value = codec.encode("Gap", {"missed": seq, "reason": "x" * size})
        log.append(Entry(f"t/{seq % 3}", {"source": log.source, "source-seq": str(seq)}, value))


def forwarder(log: CaptureLog, bus: MemoryBus, tmp_path: Path, **kw: Any) -> Forwarder:
    return Forwarder(log, bus, TOPIC, ClaimStore(str(tmp_path / "claims")), **kw)


def arrived(bus: MemoryBus) -> list[list[int]]:
    """Numbers in order of arrival, by partition."""
    return [[int(r.headers["source-seq"]) for r in bus.read(TOPIC, p)] for p in range(2)]


def flat(parts: list[list[int]]) -> list[int]:
    return [seq for part in parts for seq in part]


def assert_marks_drop_duplicates_alone(parts: list[list[int]]) -> None:
    """What a reader's high-water mark lets through is everything."""
    for part in parts:
        mark, kept = -1, []
        for seq in part:
            if seq > mark:
                mark = seq
                kept.append(seq)
        assert kept == sorted(set(part))


def test_everything_arrives_in_order(log: CaptureLog, bus: MemoryBus, tmp_path: Path):
    put(log, 30)
    sender = forwarder(log, bus, tmp_path)
    sender.start()
    put(log, 30)
    assert sender.drained(10)
    sender.close()
    found = arrived(bus)
    assert sorted(flat(found)) == list(range(60))
    assert all(part == sorted(part) for part in found)
    assert log.acked == 60
    assert log.waiting == 0


def test_a_restart_sends_again_from_the_acknowledged_position(log: CaptureLog, bus: MemoryBus, tmp_path: Path):
    put(log, 10)
    first = forwarder(log, bus, tmp_path)
    first.start()
    assert first.drained(10)
    first.close()
    log.acked = 4  # as if it had died before writing the rest down
    put(log, 5)
    second = forwarder(log, bus, tmp_path)
    second.start()
    assert second.drained(10)
    second.close()
    found = arrived(bus)
    assert set(flat(found)) == set(range(15))
    assert sorted(flat(found))[4:16] == sorted([*range(4, 10), *range(4, 10)])
    assert_marks_drop_duplicates_alone(found)


def test_large_events_become_claims(log: CaptureLog, bus: MemoryBus, tmp_path: Path):
    put(log, 1, size=2000)
    sender = forwarder(log, bus, tmp_path, max_record=1000)
    sender.start()
    assert sender.drained(10)
    sender.close()
    (record,) = [r for p in range(2) for r in bus.read(TOPIC, p)]
    assert record.value is not None
    assert codec.name_of(record.value) == "Claim"
    whole = ClaimStore(str(tmp_path / "claims")).resolve(record)
    assert whole.value is not None
    assert codec.decode_as("Gap", whole.value)["reason"] == "x" * 2000


def test_an_unreachable_log_is_tried_again(
    log: CaptureLog, bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    left = 2
    publisher = bus.publisher

    def flaky(*, gapless: bool) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            raise UnreachableError("down")
        return publisher(gapless=gapless)

    monkeypatch.setattr(bus, "publisher", flaky)
    put(log, 3)
    sender = forwarder(log, bus, tmp_path)
    sender.start()
    assert sender.drained(20)
    sender.close()
    assert sender.failures == 2
    assert sorted(flat(arrived(bus))) == [0, 1, 2]


def test_what_the_topic_refuses_as_too_large_goes_as_a_claim_and_nothing_overtakes_it(
    log: CaptureLog, tmp_path: Path
) -> None:
    bus = MemoryBus(max_bytes=1000)
    bus.ensure_topics([TopicSpec(TOPIC, 2)])
    put(log, 4)
    put(log, 1, size=2000)
    put(log, 10)
    sender = forwarder(log, bus, tmp_path)
    sender.start()
    assert sender.drained(20)
    sender.close()
    found = arrived(bus)
    assert sorted(set(flat(found))) == list(range(15))
    assert_marks_drop_duplicates_alone(found)
    (claim,) = [r for p in range(2) for r in bus.read(TOPIC, p) if r.headers["source-seq"] == b"4"]
    assert codec.name_of(claim.value or b"") == "Claim"
