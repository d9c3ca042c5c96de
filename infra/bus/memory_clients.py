"""Who writes to and reads from the bus in memory: publisher, transactor, tail and member, and the logs they share.

Invariants: whatever changes a log or a group holds the bus's lock; no lock is held at a point of `infra.faults`.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from infra import faults
from infra.bus.base import (
    EARLIEST,
    LATEST,
    Member,
    MemberToken,
    OnAssign,
    OnRevoke,
    Outgoing,
    Place,
    Publisher,
    Record,
    Sent,
    Tail,
    Transactor,
)
from infra.errors import BusError, FencedError, RefusedError, TopicError, UnreachableError

if TYPE_CHECKING:
    from infra.bus.memory import MemoryBus


class Log:
    """One partition. `entries[i]` is offset `i`; None is a marker, an aborted record or a deleted one."""

    __slots__ = ("entries", "open", "start", "topic")

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.entries: list[Record | None] = []
        self.open: dict[MemoryTransactor, int] = {}
        self.start = 0

    @property
    def stable(self) -> int:
        return min(self.open.values()) if self.open else len(self.entries)


@dataclass(slots=True)
class Group:
    topic: str
    generation: int = 0
    members: dict[str, MemoryMember] = field(default_factory=dict)
    assignment: dict[str, set[int]] = field(default_factory=dict)
    offsets: dict[int, int] = field(default_factory=dict)
    pending: dict[int, int] = field(default_factory=dict)
    """partition -> open transactions that carry an offset of it"""

    def rebalance(self, partitions: int) -> None:
        """A new generation: partitions spread evenly over the members, moving as few as possible."""
        self.generation += 1
        names = list(self.members)
        kept = {name: sorted(self.assignment.get(name, ())) for name in names}
        free = sorted(set(range(partitions)) - {p for owned in kept.values() for p in owned})
        low, extra = divmod(partitions, len(names)) if names else (0, 0)
        for name in sorted(names, key=lambda n: -len(kept[n])):
            most = low + 1 if extra > 0 else low
            extra -= 1
            free += kept[name][most:]
            kept[name] = kept[name][:most]
        for p in sorted(free):
            if names:
                kept[min(names, key=lambda n: len(kept[n]))].append(p)
        self.assignment = {name: set(owned) for name, owned in kept.items()}


class MemoryPublisher(Publisher):
    def __init__(self, bus: MemoryBus, *, gapless: bool) -> None:
        self._bus = bus
        self._gapless = gapless
        self._failed: BusError | None = None

    def publish(self, out: Outgoing) -> Future[Place]:
        future: Future[Place] = Future()
        try:
            if self._failed is not None:
                raise self._failed
            with self._bus.lock:
                place = self._bus.append(out, None)
                self._bus.changed.notify_all()
        except BusError as error:
            self._failed = error if self._gapless else None
            future.set_exception(error)
        else:
            future.set_result(place)
        return future

    def flush(self, timeout_s: float = 30.0) -> None:
        """Everything was answered when it was published."""


class MemoryTransactor(Transactor):
    """One incarnation of a transactional id."""

    def __init__(self, bus: MemoryBus, transactional_id: str) -> None:
        self._bus = bus
        self._id = transactional_id
        self._fenced = False
        self._lapsed = False
        self._open = False
        self._sent: list[tuple[Sent, Place]] = []
        self._places: list[Place] = []
        self._offsets: tuple[Group, dict[int, int]] | None = None

    def fence(self, *, dead: bool) -> None:
        """A new owner came: what is in doubt is aborted and, if `dead`, nothing else will be done here."""
        lapsed = self._open
        self._settle(keep=False)
        self._fenced, self._lapsed = dead, lapsed

    def begin(self) -> None:
        self._check(open_=False)
        self._open = True

    def send(self, out: Outgoing, *, placed: bool = True) -> Sent:
        sent = Sent()
        with self._bus.lock:
            self._check(open_=True)
            place = self._bus.append(out, self)
            if placed:
                self._sent.append((sent, place))
            self._places.append(place)
        return sent

    def flush(self) -> None:
        self._check(open_=True)
        for sent, place in self._sent:
            sent.fill(place)
        self._sent.clear()

    def commit(self, offsets: Mapping[tuple[str, int], int], member: MemberToken | None) -> None:
        self.flush()
        if offsets:
            if member is None:
                raise ValueError("offsets are committed on behalf of a member: pass its token")
            with self._bus.lock:
                self._check(open_=True)
                self._add_offsets(offsets, member)
        faults.point("transactor.after_offsets")
        with self._bus.lock:
            self._check(open_=True)
            self._settle(keep=True)
            self._bus.changed.notify_all()

    def abort(self) -> None:
        with self._bus.lock:
            if self._open:
                self._check(open_=True)
                self._settle(keep=False)
                self._bus.changed.notify_all()

    def close(self) -> None:
        with self._bus.lock:
            if not self._fenced:
                self._settle(keep=False)
                self._bus.changed.notify_all()
                if self._bus.owners.get(self._id) is self:
                    del self._bus.owners[self._id]
            self._fenced = True

    def _check(self, *, open_: bool) -> None:
        if self._fenced:
            raise FencedError(f"{self._id} has a new owner: drop this transactor and restore from the log")
        if self._lapsed:
            raise UnreachableError(f"the transaction of {self._id} timed out: open a new transactor")
        if self._open is not open_:
            raise RuntimeError("a transaction is open" if self._open else "no transaction is open: begin() first")

    def _add_offsets(self, offsets: Mapping[tuple[str, int], int], member: MemberToken) -> None:
        group = self._bus.groups[member.group]
        current = group.generation == member.generation and member.member_id in group.members
        if self._bus.fencing and not current:
            self._settle(keep=False)
            raise RefusedError(f"group {member.group} moved on from generation {member.generation}: poll again")
        self._offsets = (group, {p: offset for (_, p), offset in offsets.items()})
        for p in self._offsets[1]:
            group.pending[p] = group.pending.get(p, 0) + 1

    def _settle(self, *, keep: bool) -> None:
        """Decide the open transaction: a marker in every partition it touched, holes if it is not kept."""
        touched = {(place.topic, place.partition) for place in self._places}
        if not keep:
            for topic, partition, offset in self._places:
                self._bus.logs[topic][partition].entries[offset] = None
        for topic, partition in touched:
            log = self._bus.logs[topic][partition]
            log.open.pop(self, None)
            log.entries.append(None)
        if self._offsets is not None:
            group, moved = self._offsets
            for p, offset in moved.items():
                group.pending[p] -= 1
                if keep:
                    group.offsets[p] = offset
            self._offsets = None
        self._places.clear()
        self._sent.clear()
        self._open = False


class _Reader:
    """Positions over partitions, read in turn so that no partition starves."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus
        self.at: dict[tuple[str, int], int] = {}
        self.paused: set[tuple[str, int]] = set()

    def start(self, topic: str, partition: int, offset: int) -> None:
        log = self._bus.of(topic)[partition]
        self.at[topic, partition] = {EARLIEST: log.start, LATEST: log.stable}.get(offset, offset)

    def take(self, max_records: int) -> list[Record]:
        found: list[Record] = []
        for where in list(self.at):
            position = self.at[where]
            log = self._bus.logs[where[0]][where[1]]
            stable = log.stable
            if position >= stable or where in self.paused:
                continue
            if position < log.start:
                raise TopicError(
                    f"records {position} to {log.start} of {where[0]}[{where[1]}] are gone: keep them longer"
                )
            entries = log.entries
            while position < stable and len(found) < max_records:
                record = entries[position]
                position += 1
                if record is not None:
                    found.append(record)
            self.at[where] = position
            if len(found) >= max_records:
                self.at[where] = self.at.pop(where)  # to the back of the line
                break
        return found

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        with self._bus.lock:
            found = self.take(max_records)
            if not found and timeout_s > 0:
                self._bus.changed.wait(timeout_s)
                found = self.take(max_records)
            return found


class MemoryTail(Tail):
    def __init__(self, bus: MemoryBus, positions: Mapping[tuple[str, int], int]) -> None:
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
        bus: MemoryBus,
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
        found = self._reader.poll(max_records, timeout_s)
        if self._bus.groups[self._group].generation == self.generation:
            return found
        self._follow_group()  # what was read for a slot that has moved is not ours any more
        return [record for record in found if record.partition in self._owned]

    def _follow_group(self) -> None:
        group = self._bus.groups[self._group]
        with self._bus.lock:
            if group.generation == self.generation and self._member_id in group.members:
                return
            expelled = self._member_id not in group.members
            lost = set(self._owned) if expelled else self._owned - group.assignment[self._member_id]
            if expelled:
                self._join()
            gained = group.assignment[self._member_id] - (self._owned - lost)
            self.generation = group.generation
        self._let_go(lost)
        self._owned |= gained
        if gained:
            starts = (self._on_assign(set(gained)) if self._on_assign else None) or {}
            unknown = gained - starts.keys()
            settled = self.committed(unknown) if unknown else {}
            for p in gained:
                self._reader.start(self._topic, p, starts.get(p, settled.get(p, EARLIEST)))

    def _let_go(self, lost: set[int]) -> None:
        self._owned -= lost
        for p in lost:
            self._reader.at.pop((self._topic, p), None)
            self._reader.paused.discard((self._topic, p))
        if lost and self._on_revoke:
            self._on_revoke(lost)

    def assigned(self) -> set[int]:
        return set(self._owned)

    def token(self) -> MemberToken:
        if self.generation < 0:
            raise RefusedError(f"not a member of {self._group} yet: poll until partitions are assigned")
        return MemberToken(self._group, self.generation, self._member_id)

    def committed(self, partitions: set[int]) -> dict[int, int]:
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
