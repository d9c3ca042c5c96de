"""A turn as a pure function: records and a time in; emits, ranges and a changed state out.

Invariants: what comes out depends on the state, the records in their order and the clock value, and on nothing else;
where turns are cut does not matter to a stage without clock. `now` never falls. A wake fires once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from infra.bus.base import Record
from infra.errors import StageError
from infra.runner.marks import Marks
from infra.runner.state import OWN, State
from infra.stage import TICK, Append, Clear, Emit, Op, Put, Stage, Wake
from infra.topics import logical_name
from schemas.ids import Micros

SECOND = 1_000_000
WAKES_AT_ONCE = 10_000
"""how often one key may fire at one time before it counts as an endless loop"""

_SLOT = f"{OWN}slot"


@dataclass(slots=True)
class Folded:
    """What a turn came to. An emit's scope is the record or wake that it was yielded for: refs hold inside it."""

    number: int
    clock: Micros | None
    now: Micros = 0
    emits: list[tuple[int, Emit]] = field(default_factory=list)
    ranges: list[dict[str, Any]] = field(default_factory=list)
    records: int = 0
    duplicates: int = 0


class Fold:
    """The fold of one slot: its stage, its state and its time."""

    def __init__(self, stage: Stage, state: State, *, skip_duplicates: bool = True) -> None:
        """`skip_duplicates=False` is for tests that show what the marks are good for."""
        self._stage = stage
        self.state = state
        self._marks = Marks(state)
        self._skip = skip_duplicates
        own = state.own(_SLOT)
        known: dict[str, Any] = next((value for _, value in own), {"now": 0, "turns": 0, "sides": {}})
        self.now: Micros = known["now"]
        self.turns: int = known["turns"]
        self.sides: dict[str, int] = known["sides"]
        """next offset to read of each side, by logical name"""
        if stage.clock and state.timer(TICK) is None:
            state.wake(TICK, 0)

    def idle(self, clock: Micros | None) -> bool:
        """Whether a turn without records would do nothing."""
        if clock is None:
            return True
        at = self.state.next_wake()
        return at is not None and at > max(self.now, clock)

    def turn(self, records: Iterable[Record], clock: Micros | None) -> Folded:
        """Fold one turn. `clock` is given to clock stages, else None. Raises StageError; the state is lost then."""
        stage, state = self._stage, self.state
        out = Folded(self.turns, clock)
        if clock is not None:
            self.now = max(self.now, clock)
            self._fire(out)
        where: tuple[str, int] | None = None
        name, span = "", dict[str, Any]()
        for record in records:
            if where != (record.topic, record.partition):
                where = (record.topic, record.partition)
                name = logical_name(record.topic)
                first = {"topic": name, "partition": record.partition, "first": record.offset}
                span = first | {"last": record.offset, "count": 0, "skipped": 0}
                out.ranges.append(span)
            span["last"] = record.offset
            if name in stage.sides and name != stage.primary:
                self.sides[name] = record.offset + 1
            elif self._skip and self._marks.repeated(record.headers):
                span["skipped"] += 1
                out.duplicates += 1
                continue
            span["count"] += 1
            if clock is None:
                at = stage.time_of(state, record)
                if at is not None and at > self.now:
                    self.now = at
                    self._fire(out)
            self._apply(stage.on_record(state, record, self.now), out)
            self._fire(out)
        self.turns += 1
        out.now = self.now
        out.records = sum(span["count"] for span in out.ranges)
        self._marks.save()
        state.put(_SLOT, {"now": self.now, "turns": self.turns, "sides": self.sides})
        return out

    def _fire(self, out: Folded) -> None:
        fired: dict[str, int] = {}
        while (key := self.state.due(self.now)) is not None:
            fired[key] = fired.get(key, 0) + 1
            if fired[key] > WAKES_AT_ONCE:
                raise StageError(f"{self._stage.name} wakes {key!r} endlessly at {self.now}: set it later than now")
            if key == TICK and self._stage.clock:
                self.state.wake(TICK, (self.now // SECOND + 1) * SECOND)
            self._apply(self._stage.on_wake(self.state, key, self.now), out)

    def _apply(self, ops: Iterable[Op], out: Folded) -> None:
        state, scope = self.state, len(out.emits)
        for op in ops:
            if isinstance(op, Emit):
                out.emits.append((scope, op))
                continue
            if op.key.startswith(OWN):
                raise StageError(
                    f"{self._stage.name} uses key {op.key!r}: keys that start with {OWN!r} are the runner's"
                )
            match op:
                case Put(key, value):
                    state.put(key, value)
                case Append(key, value):
                    state.append(key, value)
                case Clear(key):
                    state.clear(key)
                case Wake(key, at):
                    state.wake(key, at)
