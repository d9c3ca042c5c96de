"""The contract of a stage: a pure fold from a record and the state of its slot to operations.

Invariants:

- A stage has no clock, no network, no Kafka and no state of its own: everything it knows comes from `view`, the record
  and `now`. So any turn can be folded again.
- `on_record` and `on_wake` are generators of operations. Each operation is applied to the view as it is yielded, so the
  code after a `yield Put(...)` sees it.
- What `View.get` and `View.items` return must not be mutated: yield a `Put` instead. Values come back as msgpack gives
  them (tuples as lists). `millrace.testing.world` detects mutations.
- A record or wake is folded whole or not at all: when a generator raises, or one of its operations cannot be logged or
  encoded, all its operations are undone and the record ends as a dead letter `unfoldable`. That is a net, not a way to
  refuse: what a stage does not want it answers with a dead letter that says why.
- The keys of the state are typed: a `Table` makes them, and says what lies under each (`Table[T].key() -> Key[T]`,
  `View.get(Key[T]) -> T | None`), so the type checker finds a misspelt key of a value as it does of a record.
- Topic names here are logical, without namespace (`raw`, `events`, `<policy>.completions`).
- Keys that start with `~` belong to the runner; `tick` is the wake key of clock stages.

Time: the slot's `now` never falls. In a clock stage it is max(last, clock) once a turn, and `tick` wakes it once in
each second of the clock. In any other stage it is the largest `time_of` so far, and before a record of time t is folded
the wakes due at or before t fire, in order of (at, key), with now = t. Wakes set for a time that has already come fire
right after the record or wake that set them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, cast

from millrace.infra.log.base import Record
from millrace.schemas import records
from millrace.schemas.ids import Micros

NO_TEXTS: Mapping[str, str] = MappingProxyType({})
TICK = "tick"


T = TypeVar("T")


class Key(str, Generic[T]):
    """A key of the state under which a T lies. It is a type alone: at run time every key is a plain `str`."""


class Later(NamedTuple):
    """Stands in an emit's record for the place of the emit whose `ref` it names, yielded for the same record or wake.

    The runner replaces it by {"topic", "partition", "offset"} once the log has answered, in the same transaction."""

    ref: str


def later(ref: str) -> records.Place:
    """A `Later` where a record wants a place."""
    return cast(records.Place, Later(ref))


HeaderName = Literal["kind", "policy", "group", "ticket", "round", "seq", "reason", "stage"]
"""headers of grants, resolutions and dead letters"""


@dataclass(frozen=True, slots=True)
class Emit:
    """A record out. Encoded as `name` by the runner; without a partition, the key's hash decides.

    Emits of one turn to one topic keep their order. One that is too large for its topic is stored as a claim."""

    topic: str
    key: str
    name: str
    record: records.Record
    partition: int | None = None
    headers: Mapping[HeaderName, str] | Mapping[str, str] = field(default_factory=lambda: NO_TEXTS)
    ref: str = ""


@dataclass(frozen=True, slots=True)
class Put:
    """Set a key to any value that msgpack can write, bytes included; None is a value like any other. `Table.put` makes
    one whose value is what belongs under the key."""

    key: Key[Any]
    value: object


@dataclass(frozen=True, slots=True)
class Append:
    """Append an item to a key. It is logged once and never rewritten; a key may hold a value and items. `Table.append`
    makes one."""

    key: Key[Any]
    value: object


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget the value, the items and the timer of a key."""

    key: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Set the one timer of a key to micros of the slot's time; None cancels it. It is gone once it fired."""

    key: str
    at: Micros | None


Op: TypeAlias = Emit | Put | Append | Clear | Wake


class View(Protocol):
    """The slot's state, read-only, earlier operations of the turn included."""

    @property
    def slot(self) -> int:
        """Which partition of the primary this is."""

    def get(self, key: Key[T]) -> T | None:
        """The value of a key, None when it has none."""

    def items(self, key: Key[T]) -> Sequence[T]:
        """What was appended to a key, in order; empty when nothing was."""

    def keys(self, prefix: str = "") -> list[str]:
        """Keys that hold a value or items and start with `prefix`, sorted."""


def require(view: View, key: Key[T]) -> T:
    """The value of a key. Raises KeyError when it has none: what is folded then is unfoldable."""
    value = view.get(key)
    if value is None:
        raise KeyError("the state has nothing under a key that must have a value")
    return value


class Table(Generic[T]):
    """All keys with one prefix: under each lies a T, or Ts were appended to it."""

    __slots__ = ("prefix",)

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def key(self, name: str = "") -> Key[T]:
        """The key of this name. A table of one key has no name to give."""
        return cast("Key[T]", self.prefix + name)

    def match(self, key: str) -> Key[T] | None:
        """A key as one of this table, None for another's."""
        return cast("Key[T]", key) if key.startswith(self.prefix) else None

    def keys(self, view: View) -> list[Key[T]]:
        """The keys that hold something, sorted."""
        return [cast("Key[T]", key) for key in view.keys(self.prefix)]

    def put(self, key: Key[T], value: T) -> Put:
        """Set a key of this table."""
        return Put(key, value)

    def append(self, key: Key[T], item: T) -> Append:
        """Append an item to a key of this table."""
        return Append(key, item)


class Stage(ABC):
    """One deciding stage. Its fields are fixed for its lifetime."""

    name: str
    primary: str
    """logical topic; each partition of it is a slot: one owner, one state, one transaction at a time"""
    sides: Sequence[str] = ()
    """logical one-partition topics, read whole from the start by every slot; what they held when a slot was opened is
    folded before its primary"""
    clock: bool = False
    """whether the runner's clock is the slot's time"""

    def time_of(self, view: View, record: Record) -> Micros | None:
        """The log time that a record carries, None when it carries none. Not asked in clock stages."""
        return None

    @abstractmethod
    def on_record(self, view: View, record: Record, now: Micros) -> Iterable[Op]:
        """Fold one record of the primary or of a side (`millrace.infra.log.topics.logical_name` tells which)."""

    def on_wake(self, view: View, key: str, now: Micros) -> Iterable[Op]:
        """A timer set by `Wake`, or `tick`, is due."""
        return ()

    def on_unfoldable(self, view: View, key: str, now: Micros) -> Iterable[Op]:
        """`on_wake` raised for this key: what it did is undone, its timer is gone, and a dead letter says so. End what
        waited for it, so that everything in it has an end too."""
        return ()

    def kept_name(self, source: str) -> str:
        """The name under which the runner may remember a source that numbers its records: the same for the same."""
        return source

    def ids_of(self, view: View, what: Record | str) -> Mapping[str, object]:
        """The envelope's ids (id, tenant, policy, group, trajectory), as far as they are known, of a record that could
        not be folded, or of what a timer's key stands for. They go into its dead letter; nothing is lost by raising."""
        return {}
