"""Rows of a policy's topics, or of a stretch of one, in log order.

Invariants: committed records only; one record is held at a time, however long the topic is; a topic that does not exist
reads as empty; what retention has taken is left out, and `Bus.starts` says so; a record that cannot be read never ends
a reading, unless whoever reads wants it to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, overload

from millrace.infra.errors import ClaimError, StorageError, TopicError
from millrace.infra.log.base import Bus, Place, Record
from millrace.infra.log.history.kinds import HOLDS, SHARED_KINDS, Kind, R, topics_of
from millrace.infra.log.history.rows import Resolve, Row, as_stored, row_of
from millrace.infra.log.readable import passed_over
from millrace.schemas.errors import BeyondBounds, SchemaError
from millrace.schemas.limits import beyond

Unreadable = Callable[[str, Record, SchemaError | ClaimError], Row[Any] | None]
"""what is done about a record of a kind of topic that cannot be read: a row that stands for it, None to leave it out,
or the error raised"""


def left_out(kind: str, record: Record, error: SchemaError | ClaimError) -> None:
    """Say nothing: what does not decode is about nothing that could be named. The audit names it."""


def name_in_log(kind: str, record: Record, error: SchemaError | ClaimError) -> None:
    """Name it in the log of this process. Raises a StorageError, since that says nothing about the record."""
    if isinstance(error, StorageError):
        raise error
    no_such = f"it is no {HOLDS[kind][0]} ({type(error).__name__})"
    passed_over(record, str(error) if isinstance(error, BeyondBounds) else no_such)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of each partition: offsets in [start, end) whose records were written in [since, until), in micros. What
    is None has no bound; the end is the stable one when the reading of a partition begins."""

    start: int = 0
    end: int | None = None
    since: int | None = None
    until: int | None = None

    def holds(self, record: Record) -> bool:
        """Whether a record was written in the stretch's time."""
        return (self.since is None or record.timestamp >= self.since) and (
            self.until is None or record.timestamp < self.until
        )


FULL_STRETCH = Stretch()


class History:
    """The topics of one policy. `resolve` reads claims of large records (`ClaimStore.resolve`); without it they count
    as records that cannot be read. `bounded`: so do records with a field beyond its bound, for whoever acts on them."""

    def __init__(
        self, bus: Bus, namespace: str, policy: str, resolve: Resolve = as_stored, *, is_bounded: bool = False
    ) -> None:
        self.bus = bus
        self.namespace = namespace
        self.policy = policy
        self.resolve = resolve
        self.names = topics_of(namespace, policy)
        """full names of the topics by kind"""
        self._own = policy.encode()
        self._bounded = is_bounded

    # -- topics

    def partitions(self, kind: str) -> range:
        """The partitions of a kind of topic; none of one that does not exist."""
        try:
            return range(self.bus.partitions(self.names[kind]))
        except TopicError:
            return range(0)

    def starts(self, kind: str) -> dict[int, int]:
        """First offset kept, per partition; nothing for a topic that does not exist."""
        return self._look_up(self.bus.starts, kind)

    def ends(self, kind: str) -> dict[int, int]:
        """Stable end per partition; nothing for a topic that does not exist."""
        return self._look_up(self.bus.ends, kind)

    def log_ends(self, kind: str) -> dict[int, int]:
        """End per partition of all that was written, decided or not; nothing for a topic that does not exist."""
        return self._look_up(self.bus.log_ends, kind)

    def _look_up(self, look: Callable[[str], dict[int, int]], kind: str) -> dict[int, int]:
        try:
            return look(self.names[kind])
        except TopicError:
            return {}

    # -- records

    def records(
        self, kind: str, partition: int | None = None, stretch: Stretch = FULL_STRETCH, *, own: bool = False
    ) -> Iterator[Record]:
        """Committed records as they lie there, of one partition or of all in turn. own: of a topic that policies share,
        only what is about this one or about none, as far as headers say."""
        some = self.partitions(kind) if partition is None else [partition]
        stream = chain.from_iterable(self._lying(kind, some, stretch))
        return filter(self._is_ours, stream) if own and kind in SHARED_KINDS else stream

    def _lying(self, kind: str, partitions: Sequence[int], stretch: Stretch) -> Iterator[Iterator[Record]]:
        """What lies in each of these partitions."""
        topic, since = self.names[kind], stretch.since
        is_timed = since is not None or stretch.until is not None
        first = {} if since is None else self._look_up(lambda name: self.bus.since(name, since), kind)
        for partition in partitions:
            records = self.bus.read(topic, partition, max(stretch.start, first.get(partition, 0)), stretch.end)
            yield filter(stretch.holds, records) if is_timed else records

    def _is_ours(self, record: Record) -> bool:
        return record.headers.get("policy", self._own) == self._own

    # -- rows

    def rows(
        self,
        kind: Kind[R],
        partition: int | None = None,
        stretch: Stretch = FULL_STRETCH,
        *,
        own: bool = False,
        only: Callable[[Record], bool] | None = None,
        unreadable: Unreadable = name_in_log,
    ) -> Iterator[Row[R]]:
        """Decoded records, as `records`. own: what the records themselves say counts too; only: what is not wanted is
        not decoded."""
        is_shared = own and kind in SHARED_KINDS
        for record in self.records(kind, partition, stretch, own=own):
            if only is None or only(record):
                row = self.row(kind, record, unreadable)
                if row is not None and (not is_shared or _policy_of(row) in (None, self.policy)):
                    yield row

    @overload
    def row(self, kind: Kind[R], record: Record, unreadable: Unreadable = name_in_log) -> Row[R] | None: ...

    @overload
    def row(self, kind: str, record: Record, unreadable: Unreadable = name_in_log) -> Row[Any] | None: ...

    def row(self, kind: str, record: Record, unreadable: Unreadable = name_in_log) -> Row[Any] | None:
        """One record decoded; what `unreadable` makes of it when it is none that its kind of topic holds."""
        try:
            row = row_of(kind, record, self.resolve)
            if self._bounded and (fault := beyond(row.name, row.record)):
                raise BeyondBounds(fault)
        except (SchemaError, ClaimError) as error:
            return unreadable(kind, record, error)
        return row

    def newest_by_key(self, kind: str) -> dict[bytes, Record]:
        """What a compacted topic says: the newest record of each key, without those whose key was given up. Raises
        TopicError for a topic that does not exist, which would say that nobody is there."""
        newest: dict[bytes, Record] = {}
        for partition in range(self.bus.partitions(self.names[kind])):
            for record in self.records(kind, partition):
                newest[record.key] = record
        return {key: record for key, record in newest.items() if record.value is not None}

    def fetch(
        self, kind: Kind[R], places: Sequence[Place], unreadable: Unreadable = name_in_log
    ) -> list[Row[R] | None]:
        """The rows at places in this kind of topic, in the same order; None where nothing readable lies (any more), or
        a Progress where an event should, and for a place that can be none of its: what is forged may name any."""
        topic, count = self.names[kind], len(self.partitions(kind))
        there = [p for p in places if p.topic == topic and 0 <= p.partition < count and 0 <= p.offset < 1 << 63]
        records = dict(zip(there, self.bus.fetch(there) if there else [], strict=True))
        rows = (self.row(kind, record, unreadable) if (record := records.get(place)) else None for place in places)
        return [row if row is not None and row.name == HOLDS[kind][0] else None for row in rows]


def _policy_of(row: Row[Any]) -> str | None:
    """Whose a record is, None for one about no policy."""
    policy: str | None = row.record.get("policy")
    return policy
