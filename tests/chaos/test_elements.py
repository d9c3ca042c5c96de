"""A power cut takes what was not synced, and nothing that the local broker acknowledged; and a whole deployment that
loses its power, freezes and thaws comes back with a clean audit, counted by a checker of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.infra.log.base import Outgoing, TopicSpec
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.machine.broker import Broker
from tests.chaos.count import AVRO, schemas
from tests.chaos.deploy import SMALL
from tests.chaos.disk import Disk
from tests.chaos.elements import Elements
from tests.support.stopped import stop

needs_disk = pytest.mark.skipif(not Disk.possible(), reason="a disk of our own needs root and a loop device")


def test_the_counting_checker_reads_every_avro_file() -> None:
    assert {"LedgerEntry", "Resolution"} <= schemas().keys()
    assert len(schemas()) == len(list(AVRO.glob("*.avsc")))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    found = Disk(tmp_path / "disk", 1000)
    yield found
    found.close()


@pytest.mark.slow
@needs_disk
def test_the_disk_forgets_what_was_not_synced(disk: Disk) -> None:
    synced, other = disk.place / "synced", disk.place / "other"
    with synced.open("wb") as file:
        file.write(b"kept")
        file.flush()
        os.fsync(file.fileno())
    with other.open("wb") as file:
        file.write(b"lost")
    disk.restore(disk.snapshot())
    assert synced.read_bytes() == b"kept"
    assert not other.exists() or other.read_bytes() == b""


@pytest.mark.slow
@pytest.mark.kafka
@needs_disk
@pytest.mark.timeout(600)
def test_what_the_broker_acknowledged_outlives_a_power_cut(disk: Disk) -> None:
    """Transactions and records outside them, over several partitions, cut at a moment when more is under way."""
    broker = Broker(disk.place / "broker", sync=True)
    broker.start()
    with KafkaBus(broker.bootstrap) as bus:
        bus.ensure_topics([TopicSpec("t", 3), TopicSpec("u", 1)])
        publisher, transactor = bus.publisher(), bus.transactor("one")
        for number in range(200):
            transactor.begin()
            for partition in range(3):
                transactor.send(Outgoing("t", b"", str(number).encode(), partition=partition))
            transactor.commit({}, None)
            publisher.publish(Outgoing("u", b"", str(number).encode())).result(60)
        assert broker.pid
        stop(broker.pid)
        left = disk.snapshot()
        broker.kill()
        publisher.close()
    disk.restore(left)
    broker.start()
    try:
        with KafkaBus(broker.bootstrap) as bus:
            bus.transactor("one").close()
            wanted = [str(number).encode() for number in range(200)]
            for topic, partition in (("t", 0), ("t", 1), ("t", 2), ("u", 0)):
                assert [record.value for record in bus.read(topic, partition)] == wanted
    finally:
        broker.kill()


@pytest.fixture(scope="module")
def elements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elements]:
    """One deployment for all elements: its start takes as long as what they do to it."""
    found = Elements(tmp_path_factory.mktemp("elements"), seed=0, full_s=15, deaths=2, **SMALL)
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.kafka
@needs_disk
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("element", ["power", "freeze", "full", "brokers"])
def test_a_deployment_outlives_the_elements(elements: Elements, element: str) -> None:
    """Three more versions come."""
    elements.strike(element)


@pytest.mark.slow
@pytest.mark.kafka
@needs_disk
@pytest.mark.timeout(1800)
def test_after_all_elements_the_audit_is_clean_and_nothing_was_lost_or_doubled(elements: Elements) -> None:
    outcome = elements.judge_all()
    assert outcome.good, outcome
