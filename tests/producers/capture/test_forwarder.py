"""The forwarder: order, restarts, claims, an unreachable log."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.infra import durable
from millrace.infra.errors import StorageError, UnreachableError
from millrace.infra.log.base import TopicSpec
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.memory.bus import MemoryBus
from millrace.producers.capture.entry import Entry, StoredEntry
from millrace.producers.capture.forwarder import Forwarder
from millrace.producers.capture.log import CaptureLog
from millrace.producers.capture.recent import Recent
from millrace.schemas import codec

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
    assert sender.drain(10)
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
    assert first.drain(10)
    first.close()
    log.acked = 4  # as if it had died before writing the rest down
    put(log, 5)
    second = forwarder(log, bus, tmp_path)
    second.start()
    assert second.drain(10)
    second.close()
    found = arrived(bus)
    assert set(flat(found)) == set(range(15))
    assert sorted(flat(found))[4:16] == sorted([*range(4, 10), *range(4, 10)])
    assert_marks_drop_duplicates_alone(found)


def test_large_events_become_claims(log: CaptureLog, bus: MemoryBus, tmp_path: Path):
    put(log, 1, size=2000)
    sender = forwarder(log, bus, tmp_path, max_record=1000)
    sender.start()
    assert sender.drain(10)
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
    assert sender.drain(20)
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
    assert sender.drain(20)
    sender.close()
    found = arrived(bus)
    assert sorted(set(flat(found))) == list(range(15))
    assert_marks_drop_duplicates_alone(found)
    (claim,) = [r for p in range(2) for r in bus.read(TOPIC, p) if r.headers["source-seq"] == b"4"]
    assert codec.name_of(claim.value or b"") == "Claim"


def test_what_was_just_appended_is_not_read_back(log: CaptureLog, bus: MemoryBus, tmp_path: Path):
    put(log, 50)
    log.cursor = lambda seq: pytest.fail(f"entry {seq} was read from the files")  # type: ignore[method-assign]
    sender = forwarder(log, bus, tmp_path)
    sender.start()
    for _ in range(20):
        put(log, 5)
        assert sender.drain(60)
    sender.close()
    assert sorted(flat(arrived(bus))) == list(range(150))


@pytest.mark.parametrize("limit", [0, 200, 1000])
def test_what_is_not_held_is_read_from_the_files(log: CaptureLog, bus: MemoryBus, tmp_path: Path, limit: int):
    log.recent = Recent(limit)
    put(log, 50)
    sender = forwarder(log, bus, tmp_path)
    sender.start()
    for _ in range(20):
        put(log, 5)
    assert sender.drain(60)
    sender.close()
    parts = arrived(bus)
    assert sorted(flat(parts)) == list(range(150))
    assert all(part == sorted(part) for part in parts)


@pytest.mark.parametrize("seed", range(20))
def test_recent_entries_are_given_once_in_order_without_gaps(seed: int):
    draw, recent, seq = random.Random(seed), Recent(300), 0
    given: list[int] = []
    for number in range(200):
        recent.put(StoredEntry(number, Entry("k", {}, b""), draw.randrange(1, 100)))
        if draw.random() < 0.4:
            taken = [kept.seq for kept in recent.take(seq, draw.randrange(1, 5))]
            assert taken == list(range(seq, seq + len(taken)))
            given += taken
            seq = seq + len(taken) if taken else draw.randrange(seq, number + 2)  # read elsewhere up to there
    assert len(set(given)) == len(given)


@pytest.mark.parametrize("error", [StorageError("gone"), KeyError("bucket"), OSError(28, "No space left on device")])
def test_no_trouble_of_a_storage_ends_it(
    log: CaptureLog, bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    put(log, 3)
    put(log, 1, size=2000)
    put(log, 3)
    sender = forwarder(log, bus, tmp_path, max_record=1000)
    fitting, left = sender.claims.fitting, 2

    def broken(name: str, data: bytes, largest: int) -> bytes:
        nonlocal left
        if len(data) > largest and (left := left - 1) >= 0:
            raise error
        return fitting(name, data, largest)

    monkeypatch.setattr(sender.claims, "fitting", broken)
    sender.start()
    assert sender.drain(60)
    sender.close()
    assert (sender.failed, sender.failures) == (None, 2)
    parts = arrived(bus)
    assert set(flat(parts)) == set(range(7))
    assert_marks_drop_duplicates_alone(parts)


def test_a_full_disk_under_the_position_sends_on(
    log: CaptureLog, bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write, left = durable.write, 2

    def full(*given: Any, **named: Any) -> None:
        nonlocal left
        if (left := left - 1) >= 0:
            raise OSError(28, "No space left on device")
        write(*given, **named)

    monkeypatch.setattr(durable, "write", full)
    put(log, 20)
    sender = forwarder(log, bus, tmp_path)
    sender.start()
    assert sender.drain(60)
    put(log, 20)
    assert sender.drain(60)
    sender.close()
    parts = arrived(bus)
    assert set(flat(parts)) == set(range(40))
    assert_marks_drop_duplicates_alone(parts)
    assert int((log.folder / "acked").read_bytes()) == 40
