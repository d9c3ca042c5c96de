"""Brokers that were just started or thawed know their topics before they lead them: nobody calls those missing."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from millrace.infra.errors import BusError, TopicError, UnreachableError
from millrace.infra.log.base import TopicSpec
from millrace.infra.log.kafka import bus as module
from millrace.infra.log.kafka.bus import KafkaBus

pytestmark = [pytest.mark.slow, pytest.mark.kafka]

LEADERLESS = 3


@pytest.fixture
def specs(broker: str) -> list[TopicSpec]:
    found = [TopicSpec(f"t{uuid.uuid4().hex[:12]}", 2), TopicSpec(f"t{uuid.uuid4().hex[:12]}", 1)]
    with KafkaBus(broker) as bus:
        bus.ensure_topics(found)
    return found


@pytest.fixture
def bus(broker: str) -> Iterator[KafkaBus]:
    with KafkaBus(broker) as found:
        yield found


def leaderless(bus: KafkaBus, monkeypatch: pytest.MonkeyPatch, after: int, count: float) -> None:
    """From answer `after` on, `count` answers name no leader, as a broker does that its controller has fenced."""
    ask, asked = bus.admin.list_topics, itertools.count()

    def list_topics(**options: Any) -> Any:
        found = ask(**options)
        if after <= next(asked) < after + count:
            for topic in found.topics.values():
                for partition in topic.partitions.values():
                    partition.leader = -1
        return found

    monkeypatch.setattr(bus.admin, "list_topics", list_topics)


@pytest.mark.parametrize("after", range(3))
def test_topics_are_ensured_and_checked_once_they_are_led_again(
    bus: KafkaBus, specs: list[TopicSpec], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    leaderless(bus, monkeypatch, after, LEADERLESS)
    bus.ensure_topics(specs)
    bus.check_topics(specs)
    assert [bus.partitions(spec.name) for spec in specs] == [2, 1]


def test_partitions_are_counted_once_they_are_led_again(
    bus: KafkaBus, specs: list[TopicSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaderless(bus, monkeypatch, 0, LEADERLESS)
    assert bus.partitions(specs[0].name) == 2


def test_leaders_that_stay_away_are_no_missing_topic(
    bus: KafkaBus, specs: list[TopicSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.2)
    leaderless(bus, monkeypatch, 0, float("inf"))
    with pytest.raises(UnreachableError, match=r"no leader.*Check the brokers"):
        bus.check_topics(specs)
    with pytest.raises(TopicError, match="is missing"):
        bus.partitions("t-of-nobody")


class Failed:
    """The answer of a broker that was just thawed, word for word."""

    said = "Unable to replicate the partition 1 time(s): All brokers are currently fenced, or have all their log "
    said += "directories cordoned."

    def result(self, timeout: float) -> None:
        raise KafkaException(KafkaError(KafkaError.INVALID_REPLICATION_FACTOR, self.said))


def fenced(bus: KafkaBus, monkeypatch: pytest.MonkeyPatch, count: float) -> None:
    """The first `count` requests for new topics meet brokers that their controller has fenced."""
    create, asked = bus.admin.create_topics, itertools.count()

    def create_topics(topics: Any, **options: Any) -> Any:
        return {new.topic: Failed() for new in topics} if next(asked) < count else create(topics, **options)

    monkeypatch.setattr(bus.admin, "create_topics", create_topics)


def test_topics_are_created_once_their_brokers_are_counted_in(bus: KafkaBus, monkeypatch: pytest.MonkeyPatch) -> None:
    fenced(bus, monkeypatch, 2)
    wanted = [TopicSpec(f"t{uuid.uuid4().hex[:12]}", 2), TopicSpec(f"t{uuid.uuid4().hex[:12]}", 1)]
    bus.ensure_topics(wanted)
    assert [bus.partitions(spec.name) for spec in wanted] == [2, 1]


def test_brokers_that_stay_fenced_are_called_so(bus: KafkaBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.2)
    fenced(bus, monkeypatch, float("inf"))
    with pytest.raises(UnreachableError, match=r"counts none of them in \(fenced\)") as raised:
        bus.ensure_topics([TopicSpec(f"t{uuid.uuid4().hex[:12]}", 1)])
    assert "replication" not in str(raised.value)


def test_more_copies_than_brokers_are_a_wrong_replication(broker: str) -> None:
    with KafkaBus(broker, replication=3) as bus, pytest.raises(BusError, match=r"(?i)replication factor"):
        bus.ensure_topics([TopicSpec(f"t{uuid.uuid4().hex[:12]}", 1)])
