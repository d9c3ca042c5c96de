"""What the client does with records that it cannot write, and that a gapless publisher leaves no hole all the same."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from itertools import groupby

import pytest

from millrace.infra.errors import BusError
from millrace.infra.log.base import Outgoing, Publisher, TopicSpec
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.machine.broker import Broker
from tests.support.stopped import stop

pytestmark = [pytest.mark.slow, pytest.mark.kafka]

TIMEOUT_MS = 1500
"""how long a client waits that a broker outlasts"""
COUNT = 40
PUBLISHERS = 12
"""so many that a close that leaves one record in three unanswered is seen"""


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker that may be killed and frozen."""
    with Broker(tmp_path_factory.mktemp("broker")) as running:
        running.start()
        yield running


@pytest.fixture
def bus(own_broker: Broker) -> Iterator[KafkaBus]:
    with KafkaBus(own_broker.bootstrap) as found:
        yield found


@pytest.fixture
def hasty(own_broker: Broker) -> Iterator[KafkaBus]:
    with KafkaBus(own_broker.bootstrap, {"message.timeout.ms": TIMEOUT_MS}) as found:
        yield found


def numbers(bus: KafkaBus, topic: str) -> list[int]:
    return [int((record.value or b"").partition(b" ")[0]) for record in bus.read(topic, 0)]


def write(publisher: Publisher, topic: str, number: int, *, again: bool) -> None:
    """Until it is written. `again`: after a failure, too; what was given up may be written all the same."""
    while True:
        error = publisher.publish(Outgoing(topic, b"k", b"%d" % number)).exception(120)
        if error is None:
            return
        assert again, error


@pytest.mark.parametrize("gapless", [False, True])
def test_a_record_that_the_broker_refuses(bus: KafkaBus, gapless: bool) -> None:
    topic = f"t{uuid.uuid4().hex[:12]}"
    bus.ensure_topics([TopicSpec(topic, 1, {"max.message.bytes": "2000"})])
    values = [b"%d %s" % (n, os.urandom(5000) if n == 1 else b"") for n in range(COUNT)]
    with bus.publisher(gapless=gapless) as publisher:
        publisher.publish(Outgoing(topic, b"k", values[0])).result(120)
        refused = publisher.publish(Outgoing(topic, b"k", values[1]))
        with pytest.raises(BusError):
            refused.result(120)
        for value in values[2:]:
            publisher.publish(Outgoing(topic, b"k", value))
        if not gapless:
            publisher.flush()
    assert numbers(bus, topic) == ([0] if gapless else [0, *range(2, COUNT)])


@pytest.mark.parametrize("gapless", [False, True])
def test_a_broker_that_is_away_for_longer_than_the_client_waits(
    hasty: KafkaBus, own_broker: Broker, gapless: bool
) -> None:
    topic = f"t{uuid.uuid4().hex[:12]}"
    hasty.ensure_topics([TopicSpec(topic, 1)])
    with hasty.publisher(gapless=gapless) as publisher:
        write(publisher, topic, 0, again=not gapless)
        own_broker.kill()
        waiting = [publisher.publish(Outgoing(topic, b"k", b"%d" % n)) for n in range(1, COUNT)]
        time.sleep(2 * TIMEOUT_MS / 1000)
        own_broker.start()
        if gapless:
            assert [future.result(120).offset for future in waiting] == list(range(1, COUNT))
        else:
            assert all(isinstance(future.exception(120), BusError) for future in waiting)
        write(publisher, topic, COUNT, again=not gapless)
    found = numbers(hasty, topic)
    once = [number for number, _ in groupby(found)]
    assert (found if gapless else once) == ([*range(COUNT + 1)] if gapless else [0, COUNT])


def test_closing_waits_for_nobody_and_answers_every_record(bus: KafkaBus, own_broker: Broker) -> None:
    topic = f"t{uuid.uuid4().hex[:12]}"
    bus.ensure_topics([TopicSpec(topic, 1)])
    assert own_broker.pid is not None
    publishers = [bus.publisher(gapless=True) for _ in range(PUBLISHERS)]
    for publisher in publishers:
        publisher.publish(Outgoing(topic, b"k", b"0")).result(120)
    stop(own_broker.pid)
    try:
        for publisher in publishers:
            left = publisher.publish(Outgoing(topic, b"k", b"1"))
            publisher.close()
            assert isinstance(left.exception(0), BusError)
    finally:
        os.kill(own_broker.pid, signal.SIGCONT)
