"""The bus seam: a partitioned, transactional log with consumer groups, as Kafka is one.

Invariants that both siblings keep (`tests/infra/log/test_conformance.py`):

- Offsets of a partition rise and are never dense: transaction markers and aborted records leave holes.
- Every reader sees committed records only, in offset order, and never past the stable end (the first open transaction).
  A commit is visible soon after it returned (its markers follow), and at once to whoever fences its owner.
- Opening a transactor fences every former owner of its transactional id and settles what that owner left in doubt.
- A commit that carries a member token is refused once the group has moved on since the token was captured.
- Offsets in doubt (part of an open transaction) are never answered: `Member.committed_offsets` waits, then raises.

Names of topics here are full names, with namespace. Every method may raise `UnreachableError`, and `TopicError` for a
topic that does not exist.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import NamedTuple, Self, TypedDict, Unpack

EARLIEST = -1
"""stands for the first offset kept"""
LATEST = -2
"""stands for the stable end"""

NO_HEADERS: Mapping[str, bytes] = MappingProxyType({})


class Place(NamedTuple):
    """Where one record lies. A position, never a count."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Record:
    """A committed record as read. `value` None is a tombstone; `timestamp` is micros, set by its producer."""

    topic: str
    partition: int
    offset: int
    key: bytes
    value: bytes | None
    headers: Mapping[str, bytes]
    timestamp: int

    @property
    def place(self) -> Place:
        return Place(self.topic, self.partition, self.offset)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A record to write. Without a partition, the key's murmur2 hash decides (`log.topics.partition_of`)."""

    topic: str
    key: bytes
    value: bytes | None
    headers: Mapping[str, bytes] = field(default_factory=lambda: NO_HEADERS)
    partition: int | None = None


class Receipt:
    """A record handed to a transactor. `place` is known once `Transactor.flush` has returned."""

    __slots__ = ("_place",)

    def __init__(self) -> None:
        self._place: Place | None = None

    @property
    def place(self) -> Place:
        """Raises RuntimeError before the flush: that is a bug of the caller."""
        if self._place is None:
            raise RuntimeError("the place of a sent record is known only after flush()")
        return self._place

    def fill(self, place: Place) -> None:
        """Called by the transactor when the log has answered."""
        self._place = place


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """What a topic must be. `config` holds Kafka's topic settings as strings (cleanup.policy, retention.ms, ...)."""

    name: str
    partitions: int
    config: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemberToken:
    """Proof of membership at one generation. Captured when records are polled, never refreshed before a commit."""

    group: str
    generation: int
    member_id: str
    raw: object = None


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One row of a group's table."""

    member_id: str
    client_id: str
    host: str
    partitions: frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group as the coordinator sees it; `stable` is False while it rebalances."""

    stable: bool
    members: tuple[GroupMember, ...]


OnAssign = Callable[[set[int]], Mapping[int, int] | None]
"""Called inside `Member.poll` with newly assigned partitions. May return where each begins (an offset, EARLIEST or
LATEST); a partition it leaves out begins at the group's committed offset, or at what is kept when there is none."""

OnRevoke = Callable[[set[int]], None]
"""Called inside `Member.poll` or `close` with partitions that are no longer owned, lost ones included."""


class MemberTerms(TypedDict, total=False):
    """How a member joins a group. assignor: as Kafka names it; cooperative-sticky, the default, keeps slots warm, range
    takes one generation a join."""

    client_id: str
    on_assign: OnAssign | None
    on_revoke: OnRevoke | None
    assignor: str
    session_timeout_s: float | None
    max_poll_interval_s: float


class _Closing:
    """Use as a context manager closes."""

    def close(self) -> None:
        """Let go of every resource. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Publisher(_Closing, ABC):
    """Writes outside transactions: idempotent, acknowledged by all replicas, in order per partition."""

    @abstractmethod
    def publish(self, out: Outgoing) -> Future[Place]:
        """Hand over a record. The future ends with its place, or with BadRecordError (TooLargeError among
        them), UnreachableError or BusError."""

    @abstractmethod
    def flush(self, timeout_s: float = 30.0) -> None:
        """Wait for every record handed over so far. Raises UnreachableError when some are unanswered in time."""


class Transactor(_Closing, ABC):
    """The one owner of a transactional id. After FencedError only `close` is allowed."""

    @abstractmethod
    def begin(self) -> None:
        """Start a transaction, once the last one of this transactor is ended wherever it wrote.

        Raises UnreachableError when that takes too long: close, open again."""

    @abstractmethod
    def send(self, out: Outgoing, *, wants_place: bool = True) -> Receipt:
        """Write inside the transaction. Errors may surface at `flush` or `commit` instead.

        `wants_place=False` says that nobody will ask for the place, which is cheaper."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until the log has answered every send; places are known then."""

    @abstractmethod
    def commit(self, offsets: Mapping[tuple[str, int], int], member: MemberToken | None) -> None:
        """Commit the records and, with a member, `offsets` (next offset to read per (topic, partition)).

        Raises FencedError (fatal), RefusedError (aborted; the transactor stays usable), UnreachableError (outcome
        unknown: close, open again, read what is there). Offsets need a member: ValueError otherwise."""

    @abstractmethod
    def abort(self) -> None:
        """Undo the open transaction, if any."""


class Member(_Closing, ABC):
    """One member of a consumer group on one topic. `poll` from one thread; callbacks run inside it and `close`."""

    @abstractmethod
    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        """At most `max_records`, of any owned partitions, in order per partition; [] when none came in time."""

    @abstractmethod
    def assignment(self) -> set[int]:
        """Partitions owned as of the last poll."""

    @abstractmethod
    def token(self) -> MemberToken:
        """Membership as of the last poll; commit with it what that poll returned.

        Raises RefusedError before the first assignment: a member that never joined must not commit."""

    @abstractmethod
    def committed_offsets(self, partitions: set[int]) -> dict[int, int]:
        """The group's settled offsets; a partition without one is left out. Raises UnreachableError when in doubt."""

    @abstractmethod
    def seek(self, partition: int, offset: int) -> None:
        """Read an owned partition from here on (an offset, EARLIEST or LATEST)."""

    @abstractmethod
    def pause(self, partitions: set[int]) -> None:
        """Keep these owned but return no records of them."""

    @abstractmethod
    def resume(self, partitions: set[int]) -> None:
        """Undo `pause`, from the position of the last record returned or sought."""


class Tail(_Closing, ABC):
    """A reader without ownership: follows partitions from given positions."""

    @abstractmethod
    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        """At most `max_records` committed records of all partitions, in order per partition."""

    @abstractmethod
    def positions(self) -> dict[tuple[str, int], int]:
        """Next offset to read, of every followed partition: right behind the last record, or behind holes after it."""

    @abstractmethod
    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Follow this partition from `offset` on."""

    @abstractmethod
    def add(self, topic: str, partition: int, offset: int) -> None:
        """Follow one more partition."""


class Bus(_Closing, ABC):
    """The log."""

    @abstractmethod
    def topics(self, prefix: str) -> list[str]:
        """Names of all topics that begin so, sorted; those that cannot be read now too."""

    @abstractmethod
    def partitions(self, topic: str) -> int:
        """How many partitions a topic has."""

    @abstractmethod
    def starts(self, topic: str) -> dict[int, int]:
        """First offset kept, per partition."""

    @abstractmethod
    def ends(self, topic: str) -> dict[int, int]:
        """Stable end per partition: one past the last offset whose transaction is decided."""

    @abstractmethod
    def since(self, topic: str, moment: int) -> dict[int, int]:
        """Per partition, an offset before which nothing was written at `moment` (micros) or later: the first of a
        record of that time, as producers' clocks tell it, else the end. Raises TopicError."""

    @abstractmethod
    def log_ends(self, topic: str) -> dict[int, int]:
        """End per partition of all that was written, decided or not. Raises TopicError."""

    @abstractmethod
    def read(self, topic: str, partition: int, start: int = 0, end: int | None = None) -> Iterator[Record]:
        """Committed records in [start, end), or up to the stable end at the time of the call, then stop.

        A start below what is kept begins at what is kept."""

    @abstractmethod
    def fetch(self, places: Sequence[Place]) -> list[Record | None]:
        """The records at these places, in the same order; None where nothing committed lies (any more)."""

    @abstractmethod
    def publisher(self, *, gapless: bool = False) -> Publisher:
        """A new publisher.

        `gapless` is for records that carry numbers, of which readers drop what lies below the highest: what a partition
        holds is always the beginning of what was handed over for it. So nothing times out, however long the log is
        away; after a record has failed every later one fails too; and `close` gives up what is unanswered."""

    @abstractmethod
    def transactor(self, transactional_id: str) -> Transactor:
        """Open a transactional id: fences former owners and settles what they left before it returns."""

    @abstractmethod
    def member(self, group: str, topic: str, **terms: Unpack[MemberTerms]) -> Member:
        """Join a group on a topic. The first assignment arrives in a later `poll`."""

    @abstractmethod
    def tail(self, positions: Mapping[tuple[str, int], int]) -> Tail:
        """Follow these partitions from these offsets (or EARLIEST, LATEST)."""

    @abstractmethod
    def group(self, group: str) -> GroupView:
        """The members of a group and what they own."""

    @abstractmethod
    def expel(self, group: str, member_id: str) -> bool:
        """Remove a member that is proven dead, at once. False when it was already gone or the bus cannot."""

    @abstractmethod
    def is_settled(self, topic: str, partition: int) -> bool:
        """Whether everything written so far is decided. A sole writer that has just been fenced in asks this before
        it believes what it reads: a broker can lose the end of a transaction that it decided."""

    @abstractmethod
    def mend(self) -> int:
        """End transactions that were decided but not ended, where the bus can. Call it every few seconds: only what
        stood still since the last call is looked at. Returns how many partitions were mended."""

    @abstractmethod
    def ensure_topics(self, specs: Sequence[TopicSpec]) -> None:
        """Create what is missing, have every topic forget in the parts that its spec names, then `check_topics`."""

    @abstractmethod
    def check_topics(self, specs: Sequence[TopicSpec]) -> None:
        """Raises TopicError naming every missing topic, wrong partition count, cleanup policy, retention and
        parts in which a topic forgets."""
