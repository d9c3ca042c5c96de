"""The table of topics, and that our partitioner is Kafka's."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.errors import ConfigError
from millrace.infra.log.topics import TopicSizes, full_name, logical_name, murmur2, partition_of, stages_of

# From Kafka's own UtilsTest.testMurmur2, as signed 32-bit integers.
KNOWN = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize(("data", "signed"), KNOWN.items())
def test_murmur2_is_kafkas(data: bytes, signed: int) -> None:
    assert murmur2(data) == signed & 0x7FFFFFFF


@given(st.text(), st.integers(1, 64))
def test_a_key_has_one_partition_as_text_or_bytes(key: str, count: int) -> None:
    assert 0 <= partition_of(key, count) < count
    assert partition_of(key, count) == partition_of(key.encode(), count)


def test_sizes_and_cleanup_of_a_deployment() -> None:
    specs = {spec.name: spec for spec in TopicSizes("dev", "sorter", slots=3, shards=5).specs()}
    assert specs["dev.raw"].partitions == 3
    assert specs["dev.sorter.trajectories"].partitions == 5
    assert specs["dev.sorter.ledger"].partitions == 1
    assert specs["dev.sorter.ledger"].config["retention.ms"] == "-1"
    assert specs["dev.changelog.seal"].partitions == specs["dev.turns.seal"].partitions == 3
    assert specs["dev.changelog.sorter.dispatch"].partitions == specs["dev.turns.sorter.dispatch"].partitions == 1
    assert specs["dev.changelog.refine"].config["cleanup.policy"] == "compact"
    assert specs["dev.workers"].config["cleanup.policy"] == "compact"


def test_two_policies_share_no_stage_but_refine_and_seal() -> None:
    one, two = ({spec.name for spec in TopicSizes("dev", policy).specs()} for policy in ("one", "two"))
    shared = {"raw", "events", "dead-letters", "workers", "decisions", "principals"}
    shared |= {f"{kind}.{stage}" for kind in ("changelog", "turns") for stage in ("refine", "seal")}
    assert one & two == {f"dev.{name}" for name in shared}
    assert stages_of("one") == {"refine": "refine", "seal": "seal", "dispatch": "one.dispatch"}
    assert not any("{" in spec.name + row.what for row, spec in TopicSizes("dev", "one").topics())


def test_what_is_pointed_at_is_kept_as_long_as_the_pointer() -> None:
    kept = {s.name: int(s.config.get("retention.ms", -1)) for s in TopicSizes("dev", "p").specs()}
    events, trajectories, resolutions = kept["dev.events"], kept["dev.p.trajectories"], kept["dev.p.resolutions"]
    assert kept["dev.raw"] < events == trajectories == resolutions


@pytest.mark.parametrize("namespace", ["", "a.b", "a b", "-a", "a/b"])
def test_a_namespace_that_hides_where_the_name_begins_is_refused(namespace: str) -> None:
    with pytest.raises(ConfigError, match="no dot"):
        full_name(namespace, "raw")


def test_names_go_both_ways() -> None:
    assert logical_name(full_name("dev", "p.weights")) == "p.weights"


@pytest.mark.slow
@pytest.mark.kafka
def test_librdkafka_puts_keys_where_we_say(broker: str) -> None:
    from confluent_kafka import Message, Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    name, count = f"p{uuid.uuid4().hex[:8]}", 7
    admin = AdminClient({"bootstrap.servers": broker})
    admin.create_topics([NewTopic(name, count, 1)])[name].result(10)
    producer = Producer({"bootstrap.servers": broker, "partitioner": "murmur2_random"})
    placed: dict[bytes, int] = {}

    def note(error: object, message: Message) -> None:
        assert error is None
        placed[message.key()] = message.partition()

    keys = [f"tenant/{number}".encode() for number in range(200)]
    for key in keys:
        producer.produce(name, b"", key=key, on_delivery=note)
    assert producer.flush(20) == 0
    assert placed == {key: partition_of(key, count) for key in keys}
