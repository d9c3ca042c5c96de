"""The local broker: it serves, it keeps what it acknowledged over kill -9, and it says clearly what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from infra.errors import ServiceError
from infra.services.broker import Broker, answers
from infra.services.jars import class_path, locked
from infra.services.net import free_ports


def test_the_lock_names_each_jar_once_with_its_hash() -> None:
    jars = locked()
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
    assert answers(broker, timeout_s=5)
    assert all(path.exists() for path in class_path())


@pytest.mark.slow
@pytest.mark.kafka
def test_kill_9_keeps_the_address_and_what_was_acknowledged(tmp_path: Path) -> None:
    running = Broker(tmp_path)
    try:
        running.start()
        first = running.bootstrap
        admin = AdminClient({"bootstrap.servers": first})
        admin.create_topics([NewTopic("kept", 1, 1)])["kept"].result(10)
        producer = Producer({"bootstrap.servers": first, "acks": "all", "enable.idempotence": True})
        for number in range(100):
            producer.produce("kept", str(number).encode())
        assert producer.flush(10) == 0

        (running.scratch / "left-by-a-kill.so").touch()
        running.kill()
        running.start()
        assert not (running.scratch / "left-by-a-kill.so").exists()
        assert running.bootstrap == first
        consumer = Consumer({"bootstrap.servers": first, "group.id": "check", "auto.offset.reset": "earliest"})
        consumer.assign([TopicPartition("kept", 0, 0)])
        values = [message.value() for message in consumer.consume(100, 20)]
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
