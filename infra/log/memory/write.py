"""Who writes to the bus in memory: publisher and transactor.

Invariants: whatever changes a log or a group holds the bus's lock; no lock is held at a point of
`millrace.infra.faults`.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

from millrace.infra import faults
from millrace.infra.errors import BusError, FencedError, RefusedError, UnreachableError
from millrace.infra.log.base import MemberToken, Outgoing, Place, Publisher, Receipt, Transactor
from millrace.infra.log.memory.state import MemoryGroup, MemoryState


class MemoryPublisher(Publisher):
    def __init__(self, bus: MemoryState, *, gapless: bool) -> None:
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

    def __init__(self, bus: MemoryState, transactional_id: str) -> None:
        self._bus = bus
        self._id = transactional_id
        self._fenced = False
        self._lapsed = False
        self._open = False
        self._sent: list[tuple[Receipt, Place]] = []
        self._places: list[Place] = []
        self._offsets: tuple[MemoryGroup, dict[int, int]] | None = None

    def fence(self, *, dead: bool) -> None:
        """A new owner came: what is in doubt is aborted and, if `dead`, nothing else will be done here."""
        was_open = self._open
        self._settle(keep=False)
        self._fenced, self._lapsed = dead, was_open

    def begin(self) -> None:
        self._check(open_=False)
        self._open = True

    def send(self, out: Outgoing, *, wants_place: bool = True) -> Receipt:
        receipt = Receipt()
        with self._bus.lock:
            self._check(open_=True)
            place = self._bus.append(out, self)
            if wants_place:
                self._sent.append((receipt, place))
            self._places.append(place)
        return receipt

    def flush(self) -> None:
        self._check(open_=True)
        for receipt, place in self._sent:
            receipt.fill(place)
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
        partitions = {(place.topic, place.partition) for place in self._places}
        if not keep:
            for topic, partition, offset in self._places:
                self._bus.logs[topic][partition].entries[offset] = None
        for topic, partition in partitions:
            log = self._bus.logs[topic][partition]
            log.open.pop(self, None)
            log.entries.append(None)
        if self._offsets is not None:
            group, offsets = self._offsets
            for p, offset in offsets.items():
                group.pending[p] -= 1
                if keep:
                    group.offsets[p] = offset
            self._offsets = None
        self._places.clear()
        self._sent.clear()
        self._open = False
