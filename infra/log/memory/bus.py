"""The bus in memory: the contract of `infra.log.base` without a broker, deterministic, for tests and capacity studies.

It is Kafka's semantics, not its protocols: records lie in the log from `send` on and become visible when their
transaction is decided; a decision writes a marker, an abort leaves holes; a group has a generation that every join,
leave and expulsion raises, and a member learns of it in its next `poll`. A new owner never waits for the former one to
notice (harsher than Kafka, which waits for its poll or the end of its session), so every pause makes a zombie.

Mutations for tests: `fencing=False` lets former owners and former generations commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from millrace.infra import faults
from millrace.infra.log.base import (
    Bus,
    GroupMember,
    GroupView,
    Member,
    MemberTerms,
    Place,
    Publisher,
    Record,
    Tail,
    TopicSpec,
    Transactor,
)
from millrace.infra.log.memory.read import MemoryMember, MemoryTail
from millrace.infra.log.memory.state import MemoryGroup, MemoryState, PartitionLog
from millrace.infra.log.memory.write import MemoryPublisher, MemoryTransactor
from millrace.infra.log.specs import alterations, compare
from millrace.schemas.ids import now_micros


class MemoryBus(MemoryState, Bus):
    """A log in this process. Safe to share between threads; with timeouts of 0 nothing ever waits."""

    def __init__(
        self,
        topics: Mapping[str, int] | None = None,
        *,
        fencing: bool = True,
        clock: Callable[[], int] = now_micros,
        max_bytes: int = 1 << 20,
    ) -> None:
        super().__init__(fencing, clock, max_bytes)
        self.specs: dict[str, TopicSpec] = {}
        self.ensure_topics([TopicSpec(name, count) for name, count in (topics or {}).items()])

    # -- topics

    def ensure_topics(self, specs: Sequence[TopicSpec]) -> None:
        with self.lock:
            for spec in specs:
                if spec.name not in self.specs:
                    self.specs[spec.name] = spec
                    self.logs[spec.name] = [PartitionLog(spec.name) for _ in range(spec.partitions)]
            for name, settings in alterations(specs, self.specs).items():
                self.specs[name] = replace(self.specs[name], config={**self.specs[name].config, **settings})
        self.check_topics(specs)

    def check_topics(self, specs: Sequence[TopicSpec]) -> None:
        compare(specs, self.specs)

    def topics(self, prefix: str) -> list[str]:
        return sorted(name for name in self.logs if name.startswith(prefix))

    def starts(self, topic: str) -> dict[int, int]:
        return {p: log.start for p, log in enumerate(self.of(topic))}

    def ends(self, topic: str) -> dict[int, int]:
        return {p: log.stable for p, log in enumerate(self.of(topic))}

    def since(self, topic: str, moment: int) -> dict[int, int]:
        def first(log: PartitionLog) -> int:
            offsets = (record.offset for record in log.entries if record is not None and record.timestamp >= moment)
            return next(offsets, len(log.entries))

        return {p: first(log) for p, log in enumerate(self.of(topic))}

    def log_ends(self, topic: str) -> dict[int, int]:
        return {p: len(log.entries) for p, log in enumerate(self.of(topic))}

    def is_settled(self, topic: str, partition: int) -> bool:
        return not self.of(topic)[partition].open

    def mend(self) -> int:
        """Nothing is ever lost in memory."""
        return 0

    # -- reading

    def read(self, topic: str, partition: int, start: int = 0, end: int | None = None) -> Iterator[Record]:
        log = self.of(topic)[partition]
        stop = log.stable if end is None else min(end, log.stable)
        return (record for record in log.entries[max(start, log.start) : stop] if record is not None)

    def fetch(self, places: Sequence[Place]) -> list[Record | None]:
        records: list[Record | None] = []
        for topic, partition, offset in places:
            log = self.of(topic)[partition]
            records.append(log.entries[offset] if log.start <= offset < log.stable else None)
        return records

    def tail(self, positions: Mapping[tuple[str, int], int]) -> Tail:
        return MemoryTail(self, positions)

    # -- writing

    def publisher(self, *, gapless: bool = False) -> Publisher:
        return MemoryPublisher(self, gapless=gapless)

    def transactor(self, transactional_id: str) -> Transactor:
        faults.point("transactor.before_fence")
        with self.lock:
            former = self.owners.get(transactional_id)
            if former is not None:
                former.fence(dead=self.fencing)
            owner = self.owners[transactional_id] = MemoryTransactor(self, transactional_id)
        faults.point("transactor.after_fence")
        return owner

    # -- groups

    def member(self, group: str, topic: str, **terms: Unpack[MemberTerms]) -> Member:
        with self.lock:
            self.of(topic)
            self.groups.setdefault(group, MemoryGroup(topic))
            callbacks = terms.get("on_assign"), terms.get("on_revoke")
            return MemoryMember(self, group, topic, terms.get("client_id", ""), *callbacks)

    def group(self, group: str) -> GroupView:
        with self.lock:
            entry = self.groups.get(group)
            if entry is None:
                return GroupView(True, ())
            stable = all(m.generation == entry.generation for m in entry.members.values())
            rows = tuple(
                GroupMember(name, m.client_id, "memory", frozenset((entry.topic, p) for p in entry.assignment[name]))
                for name, m in entry.members.items()
            )
            return GroupView(stable, rows)

    # -- what tests do to a log

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        """Retention: everything before `offset` is gone."""
        log = self.of(topic)[partition]
        log.start = max(log.start, min(offset, log.stable))
        log.entries[: log.start] = [None] * log.start

    def compact(self, topic: str) -> None:
        """The cleaner: of each key only the newest committed record stays, tombstones not at all."""
        for log in self.of(topic):
            newest = {r.key: r.offset for r in log.entries[: log.stable] if r is not None}
            for offset, record in enumerate(log.entries[: log.stable]):
                if record is not None and (newest[record.key] != offset or record.value is None):
                    log.entries[offset] = None

    def close(self) -> None:
        """Nothing to let go of: the log lives as long as its object."""
