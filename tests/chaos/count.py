"""Counts what a policy lost or doubled, from its topics and the Avro files alone: shares no code with Millrace.

python -m tests.chaos.count BOOTSTRAP NAMESPACE POLICY [OPTION=VALUE ...]

The options are librdkafka's, such as those that log in.
"""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fastavro
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition
from fastavro.schema import UnknownType, parse_schema

AVRO = Path(__file__).parents[2] / "schemas" / "avro"
HEAD = 10


def schemas() -> dict[str, Any]:
    """Every record by name; a file may name records of other files."""
    named: dict[str, Any] = {}
    left = [json.loads(path.read_text()) for path in sorted(AVRO.glob("*.avsc"))]
    found = {}
    while left:
        waiting = []
        for one in left:
            tried = dict(named)
            try:
                found[one["name"]] = parse_schema(one, named_schemas=tried)
            except UnknownType:
                waiting.append(one)
            else:
                named = tried
        if len(waiting) == len(left):
            raise ValueError(f"these Avro files name what is nowhere: {[one['name'] for one in left]}")
        left = waiting
    return found


def read(bootstrap: str, topic: str, login: Mapping[str, str]) -> list[bytes]:
    """Every committed value of the topic's one partition, in order."""
    options = {"bootstrap.servers": bootstrap, "group.id": "count", "isolation.level": "read_committed"}
    consumer = Consumer({**login, **options, "enable.auto.commit": False, "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    values = []
    while True:
        message = consumer.poll(60)
        if message is None:
            raise TimeoutError(f"{topic} does not answer")
        error = message.error()
        if error is not None and error.code() == KafkaError._PARTITION_EOF:
            consumer.close()
            return values
        if error is not None:
            raise OSError(error.str())
        values.append(message.value())


def count(bootstrap: str, namespace: str, policy: str, login: Mapping[str, str]) -> dict[str, int]:
    """Versions and groups, and how many of them are missing or there twice. `login`: librdkafka's options."""
    known = schemas()

    def records(topic: str, name: str) -> list[dict[str, Any]]:
        return [
            dict(fastavro.schemaless_reader(io.BytesIO(value[HEAD:]), known[name], None))  # type: ignore[call-overload]
            for value in read(bootstrap, f"{namespace}.{policy}.{topic}", login)
        ]

    ledger, resolutions = records("ledger", "LedgerEntry"), records("resolutions", "Resolution")
    versions = Counter(entry["version"] for entry in ledger)
    trained = Counter(seq for entry in ledger for seq in range(entry["seq_lo"], entry["seq_hi"]))
    ready = Counter(one["seq"] for one in resolutions if one["seq"] is not None)
    tickets = Counter(one["ticket"] for one in resolutions if one["ticket"] is not None)

    def missing(found: Counter[int]) -> int:
        return max(found, default=-1) + 1 - len(found)

    def twice(found: Counter[int]) -> int:
        return sum(number - 1 for number in found.values())

    every = (versions, trained, ready)
    return {
        "versions": len(versions),
        "groups": len(ready),
        "lost": sum(map(missing, every)) + len(trained.keys() - ready.keys()),
        "doubled": sum(map(twice, (*every, tickets))),
    }


if __name__ == "__main__":
    print(json.dumps(count(*sys.argv[1:4], dict(word.split("=", 1) for word in sys.argv[4:]))))
