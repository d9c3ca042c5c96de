"""Which partitions this process brings in: all of them, or its share of them among several processes.

The group `<namespace>.warehouse` hands out the partitions of `events`; whoever has number n of them brings in every
partition of every topic whose slot is n. Nothing is read through the group: it only says who does what.

Invariants: two processes with the same answer of the group never have a partition in common, and all of them together
have every one; a process that the group has left behind is stopped by the fences of the tables, never by the group.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping

from millrace.infra.log.base import LATEST, Bus, Member
from millrace.infra.log.topics import full_name

ANCHOR = "events"
DRAIN = 500


class Shares(ABC):
    """What a process brings in. One thread."""

    @abstractmethod
    def look(self, timeout_s: float = 0.0) -> bool:
        """Hear what the group says; whether this process has another share than when it was last asked."""

    @abstractmethod
    def has(self, topic: str, part: int) -> bool:
        """Whether it brings in this partition."""

    @abstractmethod
    def close(self) -> None:
        """Leave its share to others. Idempotent."""


class AllPartitions(Shares):
    """All partitions, for who has the tables to itself."""

    def look(self, timeout_s: float = 0.0) -> bool:
        """Nothing changes."""
        return False

    def has(self, topic: str, part: int) -> bool:
        """Yes."""
        return True

    def close(self) -> None:
        """Nothing is held."""


class GroupShares(Shares):
    """The share that the consumer group gives. Joins at the first look, when the topics may be there."""

    def __init__(self, bus: Bus, namespace: str, client_id: str = "") -> None:
        self._bus = bus
        self._group = group_of(namespace)
        self._topic = full_name(namespace, ANCHOR)
        self._client_id = client_id
        self._slots = 0
        self._member: Member | None = None
        self._mine: frozenset[int] = frozenset()
        self._fresh = False

    def look(self, timeout_s: float = 0.0) -> bool:
        if self._member is None:
            self._slots = self._bus.partitions(self._topic)
            self._member = self._bus.member(
                self._group, self._topic, client_id=self._client_id, on_assign=self._on_assign
            )
        while self._member.poll(DRAIN, timeout_s):  # whatever is fetched here is read again by its place
            timeout_s = 0.0
        if self._fresh:
            self._member.pause(self._member.assignment())
            self._fresh = False
        partitions = frozenset(self._member.assignment())
        has_changed, self._mine = partitions != self._mine, partitions
        return has_changed

    def has(self, topic: str, part: int) -> bool:
        return self._slots > 0 and slot_of(topic, part, self._slots) in self._mine

    def close(self) -> None:
        member, self._member, self._mine = self._member, None, frozenset()
        if member is not None:
            member.close()

    def _on_assign(self, partitions: set[int]) -> Mapping[int, int]:
        self._fresh = True
        return dict.fromkeys(partitions, LATEST)


def group_of(namespace: str) -> str:
    """The consumer group of the warehouse processes of a namespace."""
    return f"{namespace}.warehouse"


def slot_of(topic: str, part: int, slots: int) -> int:
    """Which share a partition belongs to. Partitions of one topic are spread evenly; topics of one partition are not
    all put upon the first."""
    return (zlib.crc32(topic.encode()) + part) % slots
