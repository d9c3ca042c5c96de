"""The records that a report is made of. Trajectories and events are not among them: the audit reads those.

Invariants: every list is in log order; a topic that does not exist reads as empty; of what policies share, only what is
about this one or about none is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from infra.bus.base import Bus, Record
from infra.errors import TopicError
from infra.topics import full_name, stages_of, turns_of
from schemas import codec
from schemas.errors import SchemaError

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read. Times are micros; `turns` holds, per `role/slot`, when each turn was written."""

    namespace: str
    policy: str
    weights: list[Fields]
    ledger: list[Fields]
    resolutions: list[Fields]
    grants: list[Fields]
    decisions: list[Fields]
    dead_letters: list[Fields]
    workers: list[Fields]
    turns: dict[str, list[int]]
    now: int


def read(bus: Bus, namespace: str, policy: str, now: int) -> Reading:
    """Read the small topics of a policy. `now` (micros) decides who counts as alive."""

    def rows(name: str) -> list[Fields]:
        return [fields for record in _records(bus, full_name(namespace, name)) if (fields := _decoded(record))]

    def ours(name: str) -> list[Fields]:
        return [fields for fields in rows(name) if fields["policy"] in (None, policy)]

    turns: dict[str, list[int]] = {}
    for role, stage in stages_of(policy).items():
        for record in _records(bus, full_name(namespace, turns_of(stage))):
            turns.setdefault(f"{role}/{record.partition}", []).append(record.timestamp)
    return Reading(
        namespace,
        policy,
        weights=rows(f"{policy}.weights"),
        ledger=rows(f"{policy}.ledger"),
        resolutions=rows(f"{policy}.resolutions"),
        grants=rows(f"{policy}.grants"),
        decisions=ours("decisions"),
        dead_letters=ours("dead-letters"),
        workers=ours("workers"),
        turns=turns,
        now=now,
    )


def _records(bus: Bus, topic: str) -> Iterator[Record]:
    try:
        partitions = bus.partitions(topic)
    except TopicError:
        return
    for partition in range(partitions):
        yield from bus.read(topic, partition)


def _decoded(record: Record) -> Fields | None:
    """The record's fields; None for tombstones and for what cannot be read, which the audit names."""
    if record.value is None:
        return None
    try:
        return codec.decode(record.value)[1]
    except SchemaError:
        return None
