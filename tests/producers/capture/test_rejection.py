"""What the log refuses as such: everything else arrives, and the record has one small event in its place."""

from __future__ import annotations

import os
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from millrace.infra import faults
from millrace.infra.config import Governance
from millrace.infra.errors import BadRecordError, BusError, TooLargeError
from millrace.infra.log.base import Bus, Outgoing, Place, Record, TopicSpec
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.stages.fold import Fold
from millrace.infra.stages.state import SlotState
from millrace.producers.capture.entry import Entry
from millrace.producers.capture.forwarder import Forwarder
from millrace.producers.capture.log import CaptureLog
from millrace.schemas import codec
from millrace.schemas.chain import event_hash
from millrace.streams.refine.stage import Refine
from millrace.testing.events import Episode

TOPIC = "t.raw"
SECRET = "what a user said in confidence"
HOLD_S = 120


class Dead(BaseException):
    """Stands for kill -9 of the process in the forwarder's thread."""


class Fussy(MemoryBus):
    """A log that refuses some numbers, each in its own way, whatever is done to them but to replace them."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses: dict[int, Callable[[], BusError]] = {}
        self.ensure_topics([TopicSpec(TOPIC, 2)])

    def append(self, out: Outgoing, owner: Any) -> Place:
        error = self.refuses.get(int(out.headers["source-seq"]))
        if error is not None and out.headers.get("kind") not in (None, b"gap"):
            raise error()
        return super().append(out, owner)


@pytest.fixture
def bus() -> Fussy:
    return Fussy()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[CaptureLog]:
    log = CaptureLog(tmp_path / "log")
    yield log
    log.close()


def capture(log: CaptureLog, episodes: int, text: Callable[[], str] = lambda: SECRET) -> None:
    """Episodes of a start, two calls and an end each, one after the other."""
    for _ in range(episodes):
        name = uuid.uuid4().hex
        episode = Episode(name, group=f"g-{name}", source=log.identity.source)
        calls = [partial(episode.call, "a", text=text()), partial(episode.call, "b")]
        for make in (episode.start, *calls, episode.end):
            episode.numbers = log.end
            append(log, make())


def append(log: CaptureLog, event: dict[str, Any]) -> None:
    names = ("id", "kind", "policy", "group", "trajectory")
    numbered = {"source": log.source, "source-seq": str(log.end)}
    headers = {name: event[name] for name in names} | numbered | {"_subject": "who asked"}
    log.append(Entry(f"{event['tenant']}/{event['group']}", headers, codec.encode("Event", event)))


def forwarder(log: CaptureLog, bus: Bus, folder: Path, topic: str = TOPIC, **kw: Any) -> Forwarder:
    return Forwarder(log, bus, topic, ClaimStore(str(folder / "claims")), **kw)


def forward(sender: Forwarder) -> None:
    sender.start()
    assert sender.drain(HOLD_S)
    sender.close()


def records(bus: Bus, topic: str = TOPIC) -> list[Record]:
    return [record for partition in range(bus.partitions(topic)) for record in bus.read(topic, partition)]


def contents(found: list[Record]) -> dict[int, bytes]:
    """What came under each number, which is the same however often it came."""
    out: dict[int, bytes] = {}
    for record in found:
        value = record.value or b""
        assert out.setdefault(int(record.headers["source-seq"]), value) == value
    return out


def kinds(found: dict[int, bytes]) -> dict[int, str]:
    return {seq: codec.decode_as("Event", value)["kind"] for seq, value in sorted(found.items()) if value}


@pytest.mark.parametrize("error", [TooLargeError, BadRecordError])
def test_a_refused_record_is_replaced_and_the_rest_goes_on(
    log: CaptureLog, bus: Fussy, tmp_path: Path, error: type[BusError]
):
    capture(log, 3)
    bus.refuses[5] = lambda: error("no")
    forward(forwarder(log, bus, tmp_path))
    found = contents(records(bus))
    assert [seq for seq, kind in kinds(found).items() if kind == "gap"] == [5]
    assert sorted(found) == list(range(12))
    refused, gap = next(iter(log.read(5))).entry, codec.decode_as("Event", found[5])
    original = codec.decode_as("Event", refused.value)
    same = ("tenant", "group", "trajectory", "step", "prev_hash", "source", "source_epoch", "source_seq", "split")
    assert {name: gap[name] for name in same} == {name: original[name] for name in same}
    assert gap["hash"] == event_hash(gap["prev_hash"], gap)
    reason = codec.decode_body("gap", gap["body"])["reason"]
    assert error.__name__ in reason
    assert f"model_call of {len(refused.value)} bytes" in reason
    for record in records(bus):
        if record.headers["source-seq"] == b"5":
            assert SECRET.encode() not in (record.value or b"")
            assert not [name for name in record.headers if name[0] == "_"]


def test_a_replaced_record_ends_as_one_event_that_keeps_its_episode_from_training(
    log: CaptureLog, bus: Fussy, tmp_path: Path
):
    capture(log, 2)
    bus.refuses[1] = lambda: TooLargeError("no")
    sender = forwarder(log, bus, tmp_path)
    forward(sender)
    log.acked = log.noted = 0  # as if it had died before writing it down
    forward(forwarder(log, bus, tmp_path))
    fold = [Fold(Refine(Governance(), [], slots=2), SlotState(slot)) for slot in range(2)]
    emits = [
        emit.record
        for slot in range(2)
        for _, emit in fold[slot].turn(bus.read(TOPIC, slot), 1_800_000_000_000_000).emits
        if emit.name in ("Event", "DeadLetter")
    ]
    assert sorted(event["source_seq"] for event in emits) == list(range(8))
    ends = {event["source_seq"]: event["governance"] for event in emits}
    assert [ends[seq]["eligibility"] for seq in range(8)] == ["aggregate"] + ["audit_only"] * 3 + ["aggregate"] * 4
    assert {ends[seq]["reason"] for seq in (1, 2, 3)} == {"gap"}


def test_what_is_no_event_leaves_its_number_alone(log: CaptureLog, bus: Fussy, tmp_path: Path):
    log.append(Entry("t/g", {"source": log.source, "source-seq": "0", "kind": "x"}, b"no event" * 9))
    capture(log, 1)
    bus.refuses[0] = lambda: TooLargeError("no")
    forward(forwarder(log, bus, tmp_path))
    found = contents(records(bus))
    assert found[0] == b""
    assert sorted(found) == list(range(5))


def test_an_unknown_refusal_is_tried_until_patience_ends(log: CaptureLog, bus: Fussy, tmp_path: Path):
    capture(log, 1)
    left = 3

    def passing() -> BusError:
        nonlocal left
        left -= 1
        if not left:
            del bus.refuses[1]
        return BusError("who knows")

    bus.refuses[1] = passing
    forward(forwarder(log, bus, tmp_path))
    assert "gap" not in kinds(contents(records(bus))).values()
    capture(log, 1)
    bus.refuses[5] = lambda: BusError("who knows")
    forward(forwarder(log, bus, tmp_path, patience_s=0.0))
    assert kinds(contents(records(bus)))[5] == "gap"


def test_a_topic_that_takes_nothing_costs_no_record(
    log: CaptureLog, bus: Fussy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Even the small event is refused: it is the topic, which somebody mends."""
    monkeypatch.setattr("millrace.producers.capture.forwarder.BACKOFF_S", (0.0, 0.001))
    capture(log, 1)
    calls, takes = 0, bus.append

    def refuse(out: Outgoing, owner: Any) -> Place:
        nonlocal calls
        calls += 1
        if calls > 5:
            bus.append = takes  # type: ignore[method-assign]
        raise TooLargeError("no")

    bus.append = refuse  # type: ignore[method-assign]
    forward(forwarder(log, bus, tmp_path))
    assert sorted(contents(records(bus))) == list(range(4))


@pytest.mark.parametrize("seed", range(12))
def test_whoever_is_killed_when_each_number_has_one_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bus: Fussy, seed: int
):
    monkeypatch.setattr("millrace.producers.capture.forwarder.BACKOFF_S", (0.0, 0.001))
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    draw = random.Random(seed)
    errors = (TooLargeError, BadRecordError)
    bus.refuses = {seq: partial(draw.choice(errors), "no") for seq in draw.sample(range(40), draw.randrange(1, 12))}
    bad, kills = sorted(bus.refuses), 20

    def hook(name: str) -> None:
        nonlocal kills
        if (
            threading.current_thread().name == "forwarder"
            and kills
            and draw.random() < 0.05 + 0.5 * ("refused" in name)
        ):
            kills -= 1
            raise Dead

    log = CaptureLog(tmp_path / "log")
    capture(log, 10)
    before = faults.install(hook)
    try:
        while log.acked < log.end:
            sender = forwarder(log, bus, tmp_path)
            sender.start()
            sender.drain(HOLD_S)
            sender.close()
            if draw.random() < 0.2:
                bus.refuses.pop(draw.randrange(40), None)  # somebody mends the topic
            log.close()
            log = CaptureLog(tmp_path / "log")
    finally:
        faults.install(before)
        log.close()
    found = contents(records(bus))
    assert sorted(found) == list(range(40))
    gaps = [seq for seq, kind in kinds(found).items() if kind == "gap"]
    assert set(bus.refuses) <= set(gaps) <= set(bad)


@pytest.mark.slow
@pytest.mark.kafka
def test_a_real_topic_that_takes_no_claim_of_a_long_name(broker: str, tmp_path: Path, log: CaptureLog):
    """One entry does not fit even as a claim, because its headers are too long; another fits as a claim alone."""
    topic = f"t{uuid.uuid4().hex[:12]}"
    capture(log, 1)
    capture(log, 1, lambda: os.urandom(20_000).hex())
    event = Episode("r", group="g").start() | {"source_seq": log.end}
    headers = {"source": log.source, "source-seq": str(log.end), "kind": "x", "long": os.urandom(20_000).hex()}
    log.append(Entry("local/g", headers, codec.encode("Event", event)))
    capture(log, 1)
    with KafkaBus(broker) as bus:
        bus.ensure_topics([TopicSpec(topic, 1, {"max.message.bytes": "4000"})])
        forward(forwarder(log, bus, tmp_path, topic))
        found = contents(records(bus, topic))
    assert sorted(found) == list(range(13))
    assert codec.name_of(found[5]) == "Claim"
    assert {seq: codec.decode_as("Event", found[seq])["kind"] for seq in (7, 8, 9)} == {
        7: "episode_ended",
        8: "gap",
        9: "episode_started",
    }
