"""The contract of a stage: a pure fold from a record and the state of its slot to operations.

Invariants:

- A stage has no clock, no network, no Kafka and no state of its own: everything it knows comes from `view`, the record
  and `now`. So any turn can be folded again.
- `on_record` and `on_wake` are generators of operations. Each operation is applied to the view as it is yielded, so the
  code after a `yield Put(...)` sees it.
- What `View.get` and `View.items` return must not be mutated: yield a `Put` instead. Values come back as msgpack gives
  them (tuples as lists). `tests.support.world` detects mutations.
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
from typing import Any, NamedTuple, Protocol, TypeAlias

from infra.bus.base import Record
from schemas.ids import Micros

NOTHING: Mapping[str, str] = MappingProxyType({})
TICK = "tick"


class Later(NamedTuple):
    """Stands in an emit's record for the place of the emit whose `ref` it names, yielded for the same record or wake.

    The runner replaces it by {"topic", "partition", "offset"} once the log has answered, in the same transaction."""

    ref: str


@dataclass(frozen=True, slots=True)
class Emit:
    """A record out. Encoded as `name` by the runner; without a partition, the key's hash decides.

    Emits of one turn to one topic keep their order. One that is too large for its topic is stored as a claim."""

    topic: str
    key: str
    name: str
    record: Mapping[str, Any]
    partition: int | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    ref: str = ""


@dataclass(frozen=True, slots=True)
class Put:
    """Set a key to any value that msgpack can write, bytes included; None is a value like any other."""

    key: str
    value: Any


@dataclass(frozen=True, slots=True)
class Append:
    """Append an item to a key. It is logged once and never rewritten; a key may hold a value and items."""

    key: str
    value: Any


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

    def get(self, key: str) -> Any | None:
        """The value of a key, None when it has none."""

    def items(self, key: str) -> Sequence[Any]:
        """What was appended to a key, in order; empty when nothing was."""

    def keys(self, prefix: str = "") -> list[str]:
        """Keys that hold a value or items and start with `prefix`, sorted."""


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
        """Fold one record of the primary or of a side (`infra.topics.logical_name` tells which)."""

    def on_wake(self, view: View, key: str, now: Micros) -> Iterable[Op]:
        """A timer set by `Wake`, or `tick`, is due."""
        return ()
