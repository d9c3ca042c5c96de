"""What the bus in memory holds: logs, groups and owners of transactional ids.

Invariant: the bus's lock is held by whoever changes one of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from millrace.infra.errors import TooLargeError, TopicError
from millrace.infra.log.base import Outgoing, Place, Record
from millrace.infra.log.topics import partition_of


class TransactionOwner(Protocol):
    """A transactor, as the log and its successor know it."""

    def fence(self, *, dead: bool) -> None:
        """A new owner came: abort what is in doubt and, if `dead`, refuse everything else."""


class GroupMembership(Protocol):
    """A member, as its group knows it."""

    client_id: str
    generation: int


class PartitionLog:
    """One partition. `entries[i]` is offset `i`; None is a marker, an aborted record or a deleted one."""

    __slots__ = ("entries", "open", "start", "topic")

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.entries: list[Record | None] = []
        self.open: dict[TransactionOwner, int] = {}
        self.start = 0

    @property
    def stable(self) -> int:
        return min(self.open.values()) if self.open else len(self.entries)


@dataclass(slots=True)
class MemoryGroup:
    topic: str
    generation: int = 0
    members: dict[str, GroupMembership] = field(default_factory=dict)
    assignment: dict[str, set[int]] = field(default_factory=dict)
    offsets: dict[int, int] = field(default_factory=dict)
    pending: dict[int, int] = field(default_factory=dict)
    """partition -> open transactions that carry an offset of it"""

    def rebalance(self, partitions: int) -> None:
        """A new generation: partitions spread evenly over the members, moving as few as possible."""
        self.generation += 1
        names = list(self.members)
        shares = {name: sorted(self.assignment.get(name, ())) for name in names}
        spare = sorted(set(range(partitions)) - {p for share in shares.values() for p in share})
        low, extra = divmod(partitions, len(names)) if names else (0, 0)
        for name in sorted(names, key=lambda n: -len(shares[n])):
            most = low + 1 if extra > 0 else low
            extra -= 1
            spare += shares[name][most:]
            shares[name] = shares[name][:most]
        for p in sorted(spare):
            if names:
                shares[min(names, key=lambda n: len(shares[n]))].append(p)
        self.assignment = {name: set(share) for name, share in shares.items()}


class MemoryState:
    """The state that a bus shares with its readers and writers. fencing: whether former owners and former generations
    are refused; clock: gives the micros of a record; max_bytes: of a record's value."""

    def __init__(self, fencing: bool, clock: Callable[[], int], max_bytes: int) -> None:
        self.fencing = fencing
        self.clock = clock
        self.max_bytes = max_bytes
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.logs: dict[str, list[PartitionLog]] = {}
        self.groups: dict[str, MemoryGroup] = {}
        self.owners: dict[str, TransactionOwner] = {}
        self._ids = 0

    def of(self, topic: str) -> list[PartitionLog]:
        """The partitions of a topic. Raises TopicError."""
        logs = self.logs.get(topic)
        if logs is None:
            raise TopicError(f"topic {topic} is missing. Create it with `millrace topics`.")
        return logs

    def partitions(self, topic: str) -> int:
        return len(self.of(topic))

    def append(self, out: Outgoing, owner: TransactionOwner | None) -> Place:
        """Write one record, as part of `owner`'s transaction or decided at once."""
        logs = self.of(out.topic)
        if out.value is not None and len(out.value) > self.max_bytes:
            raise TooLargeError(
                f"{len(out.value)} bytes for {out.topic}: store it as a claim (`millrace.infra.log.blobs`)"
            )
        partition = partition_of(out.key, len(logs)) if out.partition is None else out.partition
        if partition >= len(logs):
            raise TopicError(f"{out.topic} has no partition {partition}")
        log = logs[partition]
        offset = len(log.entries)
        if owner is not None and owner not in log.open:
            log.open[owner] = offset
        log.entries.append(Record(out.topic, partition, offset, out.key, out.value, out.headers, self.clock()))
        return Place(out.topic, partition, offset)

    def expel(self, group: str, member_id: str) -> bool:
        with self.lock:
            memory_group = self.groups.get(group)
            if memory_group is None or memory_group.members.pop(member_id, None) is None:
                return False
            memory_group.rebalance(self.partitions(memory_group.topic))
            return True

    def next_id(self) -> int:
        self._ids += 1
        return self._ids
