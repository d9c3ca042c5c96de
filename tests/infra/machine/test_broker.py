"""The local broker: it serves, it keeps what it acknowledged over kill -9, and it says clearly what is wrong."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from millrace.infra.config import load
from millrace.infra.errors import ServiceError
from millrace.infra.machine import local
from millrace.infra.machine.broker import Broker, _random_id, answers
from millrace.infra.machine.jars import class_path, locked_jars
from millrace.infra.process.net import free_ports
from tests.chaos.disk import Disk


def test_the_lock_names_each_jar_once_with_its_hash() -> None:
    jars = locked_jars()
    assert len({jar.name for jar in jars}) == len(jars)
    assert all(len(jar.sha256) == 64 for jar in jars)
    assert any(jar.artifact == "kafka_2.13" for jar in jars)


def test_nobody_answers_on_a_free_port() -> None:
    assert not answers(f"127.0.0.1:{free_ports(1)[0]}", timeout_s=0.3)


def test_a_broker_never_prepared_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="no broker in"):
        _ = Broker(tmp_path).bootstrap


@pytest.mark.slow
@pytest.mark.kafka
def test_the_shared_broker_answers(broker: str) -> None:
    assert answers(broker, timeout_s=60)
    assert all(path.exists() for path in class_path())


@pytest.mark.slow
@pytest.mark.kafka
def test_kill_9_keeps_the_address_and_what_was_acknowledged(tmp_path: Path) -> None:
    running = Broker(tmp_path)
    try:
        running.start()
        first = running.bootstrap
        admin = AdminClient({"bootstrap.servers": first})
        admin.create_topics([NewTopic("kept", 1, 1)])["kept"].result(60)
        producer = Producer({"bootstrap.servers": first, "acks": "all", "enable.idempotence": True})
        for number in range(100):
            producer.produce("kept", str(number).encode())
        assert producer.flush(60) == 0

        (running.scratch / "left-by-a-kill.so").touch()
        running.kill()
        running.start()
        assert not (running.scratch / "left-by-a-kill.so").exists()
        assert running.bootstrap == first
        consumer = Consumer({"bootstrap.servers": first, "group.id": "check", "auto.offset.reset": "earliest"})
        consumer.assign([TopicPartition("kept", 0, 0)])
        values = [message.value() for message in consumer.consume(100, 120)]
        consumer.close()
        assert values == [str(number).encode() for number in range(100)]
    finally:
        running.stop()
    assert not answers(first, timeout_s=0.3)


@pytest.mark.slow
@pytest.mark.kafka
def test_another_port_for_the_same_data_is_refused(tmp_path: Path) -> None:
    one = Broker(tmp_path)
    one.prepare()
    with pytest.raises(ServiceError, match="keep that port"):
        Broker(tmp_path, port=1).prepare()


def test_a_broker_that_syncs_says_so_on_its_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in its file, which is written once: the choice may change over the life of a home."""
    monkeypatch.setattr(Broker, "_java", lambda self, *flags: ["java", *flags])
    assert Broker(tmp_path, sync=True).command()[-2:] == ["--override", "log.flush.interval.messages=1"]
    assert "--override" not in Broker(tmp_path).command()
    assert local.broker(load(flags={"home": str(tmp_path)})).sync, "the local broker of a deployment does by default"
    assert not local.broker(load(flags={"home": str(tmp_path), "kafka.sync": False})).sync


def test_a_cluster_id_is_as_the_storage_tool_draws_them() -> None:
    """16 bytes in base64 for URLs, without padding; a dash in front would be read as an option."""
    drawn = {_random_id() for _ in range(500)}
    assert len(drawn) == 500
    assert not [one for one in drawn if one.startswith("-")]
    assert {len(base64.urlsafe_b64decode(one + "==")) for one in drawn} == {16}


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.skipif(not Disk.possible(), reason="a disk of our own needs root and a loop device")
def test_a_full_disk_empties_no_topic(tmp_path: Path) -> None:
    """Kafka itself would: with so much room it starts to recover its log, and cannot end it."""
    disk = Disk(tmp_path / "disk", 600)
    try:
        running = Broker(disk.place / "broker", sync=True)
        try:
            running.start()
            admin = AdminClient({"bootstrap.servers": running.bootstrap})
            admin.create_topics([NewTopic("kept", 8, 1)])["kept"].result(60)
            producer = Producer({"bootstrap.servers": running.bootstrap, "acks": "all", "enable.idempotence": True})
            for number in range(800):
                producer.produce("kept", bytes(200), partition=number % 8)
            assert producer.flush(60) == 0
            running.kill()
            held = {path: path.stat().st_size for path in running.home.glob("data/kept-*/*.log")}
            assert len(held) == 8
            disk.fill()
            disk.shrink(32 << 10)
            with pytest.raises(ServiceError, match="Make room"):
                running.start()
            assert {path: path.stat().st_size for path in held} == held
            disk.free()
            running.start()
            assert {path: path.stat().st_size for path in held} == held
        finally:
            running.kill()
    finally:
        disk.close()
