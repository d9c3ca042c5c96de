"""Who reads from the bus in memory: tail and member.

Invariant: whatever changes a group holds the bus's lock.
"""

from __future__ import annotations

from collections.abc import Mapping

from millrace.infra.errors import RefusedError, TopicError, UnreachableError
from millrace.infra.log.base import EARLIEST, LATEST, Member, MemberToken, OnAssign, OnRevoke, Record, Tail
from millrace.infra.log.memory.state import MemoryState


class _Reader:
    """Positions over partitions, read in turn so that no partition starves."""

    def __init__(self, bus: MemoryState) -> None:
        self._bus = bus
        self.at: dict[tuple[str, int], int] = {}
        self.paused: set[tuple[str, int]] = set()

    def start(self, topic: str, partition: int, offset: int) -> None:
        log = self._bus.of(topic)[partition]
        self.at[topic, partition] = {EARLIEST: log.start, LATEST: log.stable}.get(offset, offset)

    def take(self, max_records: int) -> list[Record]:
        records: list[Record] = []
        for where in list(self.at):
            position = self.at[where]
            log = self._bus.logs[where[0]][where[1]]
            stable = log.stable
            if position > len(log.entries):
                end = len(log.entries)
                raise TopicError(f"nothing lies at {position} of {where[0]}[{where[1]}] any more: it ends at {end}")
            if position >= stable or where in self.paused:
                continue
            if position < log.start:
                raise TopicError(
                    f"records {position} to {log.start} of {where[0]}[{where[1]}] are gone: keep them longer"
                )
            entries = log.entries
            while position < stable and len(records) < max_records:
                record = entries[position]
                position += 1
                if record is not None:
                    records.append(record)
            self.at[where] = position
            if len(records) >= max_records:
                self.at[where] = self.at.pop(where)  # to the back of the line
                break
        return records

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        with self._bus.lock:
            records = self.take(max_records)
            if not records and timeout_s > 0:
                self._bus.changed.wait(timeout_s)
                records = self.take(max_records)
            return records


class MemoryTail(Tail):
    def __init__(self, bus: MemoryState, positions: Mapping[tuple[str, int], int]) -> None:
        self._reader = _Reader(bus)
        for (topic, partition), offset in positions.items():
            self._reader.start(topic, partition, offset)

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        return self._reader.poll(max_records, timeout_s)

    def positions(self) -> dict[tuple[str, int], int]:
        return dict(self._reader.at)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        self._reader.start(topic, partition, offset)

    def add(self, topic: str, partition: int, offset: int) -> None:
        self._reader.start(topic, partition, offset)


class MemoryMember(Member):
    def __init__(
        self,
        bus: MemoryState,
        group: str,
        topic: str,
        client_id: str,
        on_assign: OnAssign | None,
        on_revoke: OnRevoke | None,
    ) -> None:
        self._bus, self._group, self._topic, self.client_id = bus, group, topic, client_id
        self._on_assign, self._on_revoke = on_assign, on_revoke
        self._reader = _Reader(bus)
        self._owned: set[int] = set()
        self._member_id = ""
        self.generation = -1
        self._closed = False
        self._join()

    def _join(self) -> None:
        group = self._bus.groups[self._group]
        self._member_id = f"{self.client_id}-{self._bus.next_id()}"
        group.members[self._member_id] = self
        group.rebalance(self._bus.partitions(self._topic))

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        self._follow_group()
        records = self._reader.poll(max_records, timeout_s)
        if self._bus.groups[self._group].generation == self.generation:
            return records
        self._follow_group()  # what was read for a slot that has moved is not ours any more
        return [record for record in records if record.partition in self._owned]

    def _follow_group(self) -> None:
        group = self._bus.groups[self._group]
        with self._bus.lock:
            if group.generation == self.generation and self._member_id in group.members:
                return
            was_expelled = self._member_id not in group.members
            losses = set(self._owned) if was_expelled else self._owned - group.assignment[self._member_id]
            if was_expelled:
                self._join()
            gains = group.assignment[self._member_id] - (self._owned - losses)
            self.generation = group.generation
        self._let_go(losses)
        self._owned |= gains
        if gains:
            starts = (self._on_assign(set(gains)) if self._on_assign else None) or {}
            unknown = gains - starts.keys()
            offsets = self.committed_offsets(unknown) if unknown else {}
            for p in gains:
                self._reader.start(self._topic, p, starts.get(p, offsets.get(p, EARLIEST)))

    def _let_go(self, partitions: set[int]) -> None:
        self._owned -= partitions
        for p in partitions:
            self._reader.at.pop((self._topic, p), None)
            self._reader.paused.discard((self._topic, p))
        if partitions and self._on_revoke:
            self._on_revoke(partitions)

    def assignment(self) -> set[int]:
        return set(self._owned)

    def token(self) -> MemberToken:
        if self.generation < 0:
            raise RefusedError(f"not a member of {self._group} yet: poll until partitions are assigned")
        return MemberToken(self._group, self.generation, self._member_id)

    def committed_offsets(self, partitions: set[int]) -> dict[int, int]:
        group = self._bus.groups[self._group]
        doubtful = sorted(p for p in partitions if group.pending.get(p))
        if doubtful:
            raise UnreachableError(
                f"offsets of {self._topic}{doubtful} are in doubt: fence their owner, then ask again"
            )
        return {p: group.offsets[p] for p in partitions if p in group.offsets}

    def seek(self, partition: int, offset: int) -> None:
        if partition in self._owned:
            self._reader.start(self._topic, partition, offset)

    def pause(self, partitions: set[int]) -> None:
        self._reader.paused |= {(self._topic, p) for p in partitions}

    def resume(self, partitions: set[int]) -> None:
        self._reader.paused -= {(self._topic, p) for p in partitions}

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._let_go(set(self._owned))
        self._bus.expel(self._group, self._member_id)
