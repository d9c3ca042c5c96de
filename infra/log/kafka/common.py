"""What the Kafka clients share: configuration, errors as ours, messages as records, places to begin."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException, Message

from millrace.infra.errors import (
    AccessError,
    BadRecordError,
    BusError,
    FencedError,
    TooLargeError,
    TopicError,
    UnreachableError,
)
from millrace.infra.log.base import EARLIEST, LATEST, NO_HEADERS, Record
from millrace.infra.log.kafka.entry import FORBIDDEN, OPTIONS, ErrorListener

log = logging.getLogger(__name__)

WAIT_S = 30.0
"""how long anything may take before the broker counts as unreachable"""

FENCE_LOSS = {
    KafkaError._FENCED,
    KafkaError._FATAL,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.TRANSACTION_COORDINATOR_FENCED,
}
MISSING = {KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART}
TOO_LARGE = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_MSG_SIZE}
BAD_RECORD = {KafkaError.INVALID_RECORD}
"""what brokers say of a record that its topic does not take, whatever its size"""
STALE = {
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError._NOENT,  # "no leaders found", while a broker restarts
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_COORDINATOR,
}
"""what a client is told whose leaders are those from before a broker's restart, or that is too early for a new topic"""
PASSING = STALE | {
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._MSG_TIMED_OUT,
    KafkaError._PURGE_QUEUE,
    KafkaError._PURGE_INFLIGHT,
    KafkaError._WAIT_COORD,
    KafkaError._IN_PROGRESS,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_COORDINATOR,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.CONCURRENT_TRANSACTIONS,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
}


def bus_error(error: KafkaError, act: str) -> BusError:
    """Our error for a client's error that happened while doing `act`."""
    code, text = error.code(), f"{act}: {error.str()}"
    if code in FORBIDDEN:
        return AccessError(f"{text}. Grant it to the user of {OPTIONS}: docs/operations.md lists what is needed.")
    if code in FENCE_LOSS or error.fatal():
        return FencedError(f"{text}. Drop this transactor and restore from the log.")
    if code in MISSING:
        return TopicError(f"{text}. Create the topics with `millrace topics`.")
    if code in TOO_LARGE:
        return TooLargeError(f"{text}. Store the record as a claim.")
    if code in BAD_RECORD:
        return BadRecordError(f"{text}. The topic's settings refuse it (kafka-configs --describe).")
    if code in PASSING or error.retriable():
        return UnreachableError(f"{text}. Check that the broker is up and reachable (`millrace doctor`).")
    return BusError(text)


def is_fenced(error: KafkaError) -> bool:
    """Whether topics cannot be created only because the controller counts no broker in now. Brokers call that a wrong
    replication factor, which it is not; their words alone tell the two apart."""
    return error.code() == KafkaError.INVALID_REPLICATION_FACTOR and "fenced" in error.str()


def raise_ours(error: KafkaException, act: str) -> NoReturn:
    """Raise a client's exception as ours."""
    raise bus_error(error.args[0], act) from error


def common(bootstrap: str, options: Mapping[str, object], client_id: str) -> dict[str, object]:
    """Configuration of every client. `options` are librdkafka's names (SASL, TLS ...) and win."""

    return {
        "bootstrap.servers": bootstrap,
        "client.id": client_id or "millrace",
        "error_cb": ErrorListener(client_id),
        "log_level": 2,
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 1000,
        "topic.metadata.refresh.interval.ms": 60_000,
        # A broker that was frozen names no broker in its first answer: the client drops the one it knows, and without
        # a new start it never finds another.
        "metadata.recovery.strategy": "rebootstrap",
        "metadata.recovery.rebootstrap.trigger.ms": 10_000,
        **options,
    }


STEADY = {"metadata.recovery.strategy": "none"}
"""for transactors: a new start leaves a producer's cached group coordinator behind for ever, and
send_offsets_to_transaction then hangs without a timeout (librdkafka 2.16); their calls have time limits instead"""


def reading(base: Mapping[str, object]) -> dict[str, object]:
    """Configuration of every reader: committed records only, and never a silent jump when records are gone."""
    return {
        "group.id": "millrace-readers",
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "auto.offset.reset": "error",
        "queued.max.messages.kbytes": 32_768,
        "fetch.error.backoff.ms": 50,
        **base,
    }


def writing(base: Mapping[str, object]) -> dict[str, object]:
    """Configuration of every writer."""
    return {
        "acks": "all",
        "enable.idempotence": True,
        "compression.type": "lz4",
        "linger.ms": 2,
        "partitioner": "murmur2_random",
        "queue.buffering.max.kbytes": 262_144,
        **base,
    }


def know_topic(client: Any, topic: str) -> None:
    """Have a client learn where a topic lies: left to itself it asks only once a second about topics new to it."""
    try:
        client.list_topics(topic, timeout=WAIT_S)
    except KafkaException as error:
        raise_ours(error, f"asking for {topic}")


Answer = TypeVar("Answer")


def patient(ask: Callable[[], Answer], client: Any, topics: Iterable[str], act: str) -> Answer:
    """The answer to a question; asked again after learning the leaders anew while the client's knowledge is stale."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return ask()
        except KafkaException as error:
            if error.args[0].code() not in STALE or time.monotonic() > deadline:
                raise_ours(error, act)
        time.sleep(0.05)
        for topic in topics:
            know_topic(client, topic)


def offset_for(position: int) -> int:
    """Kafka's number for one of ours: EARLIEST and LATEST are numbered the other way round."""
    return {EARLIEST: OFFSET_BEGINNING, LATEST: OFFSET_END}.get(position, position)


def record_of(message: Any) -> Record:
    """A message that is no error, as a record."""
    headers = message.headers()
    return Record(
        message.topic(),
        message.partition(),
        message.offset(),
        message.key() or b"",
        message.value(),
        {name: value or b"" for name, value in headers} if headers else NO_HEADERS,
        message.timestamp()[1] * 1000,
    )


def records_of(messages: list[Message], act: str) -> list[Record]:
    """The records among what a consumer returned. Raises TopicError when the position is gone, AccessError when it may
    not be read, BusError when fatal.

    What the client gets over by itself (lost connections, rebalances) is only logged."""
    records = []
    for message in messages:
        error = message.error()
        if error is None:
            records.append(record_of(message))
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise TopicError(
                f"{act}: nothing lies at the position any more ({error.str()}). A position before the topic's begin: "
                f"keep the topic longer. One behind its end: the broker lost records that it had acknowledged (a power "
                f"cut without [kafka] sync, a disk put back): begin anew in another [home]; `millrace audit` tells "
                f"what is whole."
            )
        elif error.fatal() or error.code() in MISSING | FORBIDDEN:
            raise bus_error(error, act)
        else:
            log.debug("%s: %s", act, error.str())
    return records
