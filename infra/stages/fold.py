"""A turn as a pure function: records and a time in; emits, ranges and a changed state out.

Invariants: what comes out depends on the state, the records in their order and the clock value, and on nothing else;
where turns are cut does not matter to a stage without clock. `now` never falls. A wake fires once.

A record, or a wake, is folded whole or not at all. One whose folding raises, or whose operations could not be logged or
encoded, leaves the state and the emits as they were, and a dead letter `unfoldable` that names the kind of the error;
the fold goes on. Only what says nothing about the record (`ENVIRONMENT`) ends the turn, which is then folded again.

A record that carries the headers `source` and `source-seq` (and, of a source that starts its numbers anew,
`source-epoch`) is folded once, however often it was sent, if its source sends in order; one whose headers are missing,
are no numbers, or exceed the bounds is never skipped. Only what the stage took moves a mark: bytes that were refused
cannot claim the numbers of a source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from millrace.infra.errors import StageError, StorageError
from millrace.infra.log.base import Record
from millrace.infra.log.topics import changelog_of, full_name, logical_name
from millrace.infra.stages.base import TICK, Append, Clear, Emit, Op, Put, Stage, Wake
from millrace.infra.stages.letters import UNFOLDABLE, dead_letter, place_of, refuses
from millrace.infra.stages.outbox import Encoding, encode_emit, needs, phases_of
from millrace.infra.stages.state import RUNNER_PREFIX, SlotState
from millrace.schemas import bounds
from millrace.schemas.ids import Micros
from millrace.schemas.records import Place, Range

SECOND = 1_000_000
WAKES_AT_ONCE = 10_000
"""how often one key may fire at one time before it counts as an endless loop"""
ENVIRONMENT = (StorageError, OSError, MemoryError)
"""errors of the machine, which another try may not meet: to blame the record would lose it"""

_SLOT = f"{RUNNER_PREFIX}slot"


class FoldFailure(NamedTuple):
    """What could not be folded: a line for the log of the process, without content."""

    what: str
    error: str
    """name of the exception's class"""
    where: str
    """file and line that raised it"""


@dataclass(slots=True)
class FoldedTurn:
    """What a turn came to. An emit's scope is the record or wake that it was yielded for: refs hold inside it."""

    number: int
    clock: Micros | None
    now: Micros = 0
    emits: list[tuple[int, Emit]] = field(default_factory=list)
    encodings: list[Encoding] = field(default_factory=list)
    """what each emit is encoded to"""
    ranges: list[Range] = field(default_factory=list)
    records: int = 0
    duplicates: int = 0
    failures: list[FoldFailure] = field(default_factory=list)


class _Outcome(NamedTuple):
    """What became of one record or wake."""

    error: Exception | None
    has_changed: bool
    """whether the state differs"""


class Fold:
    """The fold of one slot: its stage, its state and its time."""

    def __init__(
        self,
        stage: Stage,
        state: SlotState,
        *,
        namespace: str = "",
        skip_duplicates: bool = True,
        isolate: bool = True,
    ) -> None:
        """`namespace` is for the letters of timers. `skip_duplicates=False` is for tests that show what the marks are
        good for; `isolate=False` for tests whose stages must not fail: what one raises ends the turn."""
        self._stage = stage
        self.state = state
        self._isolate = isolate
        changelog = changelog_of(stage.name)
        self._timers = full_name(namespace, changelog) if namespace else changelog
        self._marks = SourceMarks(state, stage.kept_name)
        self._skip = skip_duplicates
        entries = state.runner_values(_SLOT)
        progress: dict[str, Any] = next((value for _, value in entries), {"now": 0, "turns": 0, "sides": {}})
        self.now: Micros = progress["now"]
        self.turns: int = progress["turns"]
        self.sides: dict[str, int] = progress["sides"]
        """next offset to read of each side, by logical name"""
        if stage.clock and state.timer(TICK) is None:
            state.wake(TICK, 0)

    def idle(self, clock: Micros | None) -> bool:
        """Whether a turn without records would do nothing."""
        if clock is None:
            return True
        at = self.state.next_wake()
        return at is not None and at > max(self.now, clock)

    def turn(self, records: Iterable[Record], clock: Micros | None) -> FoldedTurn:
        """Fold one turn. `clock` is given to clock stages, else None. Raises what `ENVIRONMENT` names; the state is
        lost then."""
        stage, state = self._stage, self.state
        out = FoldedTurn(self.turns, clock)
        if clock is not None:
            self.now = max(self.now, clock)
            self._fire(out)
        where: tuple[str, int] | None = None
        name = ""
        span: Range = {"topic": "", "partition": 0, "first": 0, "last": 0, "count": 0, "skipped": 0}
        for record in records:
            if where != (record.topic, record.partition):
                where = (record.topic, record.partition)
                name = logical_name(record.topic)
                span = {
                    "topic": name,
                    "partition": record.partition,
                    "first": record.offset,
                    "last": record.offset,
                    "count": 0,
                    "skipped": 0,
                }
                out.ranges.append(span)
            span["last"] = record.offset
            side = name in stage.sides and name != stage.primary
            if side:
                self.sides[name] = record.offset + 1
            elif self._skip and self._marks.is_repeat(record.headers):
                span["skipped"] += 1
                out.duplicates += 1
                continue
            span["count"] += 1
            if self._record(record, clock is None, out) and not side:
                self._marks.move(record.headers)
            self._fire(out)
        self.turns += 1
        out.now = self.now
        out.records = sum(span["count"] for span in out.ranges)
        self._marks.save()
        state.put(_SLOT, {"now": self.now, "turns": self.turns, "sides": self.sides})
        return out

    def _record(self, record: Record, is_timed: bool, out: FoldedTurn) -> bool:
        """Fold one record; whether the stage took it."""
        error = self._pass_time(record, out) if is_timed else None
        if error is None:
            first = len(out.emits)
            error, has_changed = self._apply_all(lambda: self._stage.on_record(self.state, record, self.now), out)
            if error is None:
                emits = out.emits[first:]
                return has_changed or not emits or not all(refuses(emit, record) for _, emit in emits)
        key = record.key.decode("utf-8", "replace")
        # Every slot reads a side, and each may fail at it in a state of its own.
        distinct = "" if logical_name(record.topic) == self._stage.primary else str(self.state.slot)
        self._unfoldable(error, place_of(record), key, record, distinct, out)
        return False

    def _pass_time(self, record: Record, out: FoldedTurn) -> Exception | None:
        """Let the time that a record carries come; why it cannot be believed, None when it can."""
        try:
            at = self._stage.time_of(self.state, record)
            if at is not None and not -bounds.TIME <= at <= bounds.TIME:
                raise OverflowError("a time beyond any calendar would fire every timer there is")
        except ENVIRONMENT:
            raise
        except Exception as error:
            if not self._isolate:
                raise
            return error
        if at is not None and at > self.now:
            self.now = at
            self._fire(out)
        return None

    def _fire(self, out: FoldedTurn) -> None:
        counts: dict[str, int] = {}
        while (key := self.state.take_due(self.now)) is not None:
            counts[key] = counts.get(key, 0) + 1
            if counts[key] > WAKES_AT_ONCE:
                if counts[key] == WAKES_AT_ONCE + 1:
                    self._endless(key, out)
                continue
            if key == TICK and self._stage.clock:
                self.state.wake(TICK, (self.now // SECOND + 1) * SECOND)
            self._wake(key, out)

    def _wake(self, key: str, out: FoldedTurn) -> None:
        error, _ = self._apply_all(lambda: self._stage.on_wake(self.state, key, self.now), out)
        if error is not None:
            self._end_wake(error, key, out)

    def _endless(self, key: str, out: FoldedTurn) -> None:
        error = StageError(f"{self._stage.name} wakes {key!r} endlessly at {self.now}: set it later than now")
        if not self._isolate:
            raise error
        self._end_wake(error, key, out)

    def _end_wake(self, error: Exception, key: str, out: FoldedTurn) -> None:
        """The timer is gone; the stage may end what waited for it."""
        place: Place = {"topic": self._timers, "partition": self.state.slot, "offset": -1}
        self._unfoldable(error, place, key, key, f"{key}@{self.now}", out)
        self._apply_all(lambda: self._stage.on_unfoldable(self.state, key, self.now), out)

    def _unfoldable(
        self, error: Exception, place: Place, key: str, source: Record | str, distinct: str, out: FoldedTurn
    ) -> None:
        kind = type(error).__name__[:100]
        ids: Mapping[str, object] = {}
        try:
            ids = self._stage.ids_of(self.state, source)
        except ENVIRONMENT:
            raise
        except Exception:
            """The letter names the place alone."""
        detail = f"{'folding it' if isinstance(source, Record) else 'a timer of the state'} raised {kind}"

        def letter(event: Mapping[str, object]) -> list[Op]:
            dead = dead_letter(
                self._stage.name, place, UNFOLDABLE, detail, self.now, key=key, event=event, distinct=distinct
            )
            return [dead]

        if self._apply_all(lambda: letter(ids), out).error is not None:  # what the stage says of it is odd, too
            self._apply_all(lambda: letter({}), out)
        out.failures.append(
            FoldFailure(f"{place['topic']}[{place['partition']}]@{place['offset']}", kind, _where(error))
        )

    def _apply_all(self, produce: Callable[[], Iterable[Op]], out: FoldedTurn) -> _Outcome:
        """Apply all operations of one record or wake, or none."""
        state, scope = self.state, len(out.emits)
        state.begin()
        try:
            for op in produce():
                self._apply(op, scope, out)
            emits, encodings = out.emits[scope:], out.encodings[scope:]
            if len(emits) > 1 or any(map(needs, encodings)):  # one alone that waits for none names none
                for _ in phases_of(emits, encodings):
                    """Raises for places that would never come."""
        except ENVIRONMENT:
            raise
        except Exception as error:
            if not self._isolate:
                raise
            state.undo()
            del out.emits[scope:], out.encodings[scope:]
            return _Outcome(error, has_changed=False)
        return _Outcome(None, state.keep())

    def _apply(self, op: Op, scope: int, out: FoldedTurn) -> None:
        state = self.state
        if isinstance(op, Emit):
            data = encode_emit(op)
            out.emits.append((scope, op))
            out.encodings.append(data)
            return
        if op.key.startswith(RUNNER_PREFIX):
            raise StageError(
                f"{self._stage.name} uses key {op.key!r}: keys that start with {RUNNER_PREFIX!r} are the runner's"
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


def _where(error: Exception) -> str:
    """File and line that raised an error; no words of it, which may quote content."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return "" if at is None else f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}"


PREFIX = f"{RUNNER_PREFIX}source/"
_NO_MARK = (-1, -1)


class SourceMarks:
    """Which records a slot has seen: one high-water mark for each source that numbers its records, in the slot's state.
    `rename` gives the name under which the stage may remember a source."""

    def __init__(self, state: SlotState, rename: Callable[[str], str]) -> None:
        self._state = state
        self._rename = rename
        self._seen: dict[str, tuple[int, int]] = {
            key.removeprefix(PREFIX): (epoch, seq) for key, (epoch, seq) in state.runner_values(PREFIX)
        }
        self._moved: set[str] = set()

    def is_repeat(self, headers: Mapping[str, bytes]) -> bool:
        """Whether a record with these headers was taken before, or one that its source numbered later."""
        number = _number_of(headers)
        return number is not None and number[1] <= self._seen.get(self._name(number[0]), _NO_MARK)

    def move(self, headers: Mapping[str, bytes]) -> None:
        """The record with these headers was taken: its number becomes its source's mark."""
        mark = _number_of(headers)
        if mark is not None:
            source, number = self._name(mark[0]), mark[1]
            self._seen[source] = number
            self._moved.add(source)

    def _name(self, source: str) -> str:
        return source if source in self._seen else self._rename(source)

    def save(self) -> None:
        """Put the marks that moved into the state, once a turn."""
        for source in sorted(self._moved):
            self._state.put(PREFIX + source, self._seen[source])
        self._moved.clear()


def _number_of(headers: Mapping[str, bytes]) -> tuple[str, tuple[int, int]] | None:
    """(source, (epoch, seq)) of a record, None for one that is not numbered."""
    source = headers.get("source")
    if source is None or len(source) > bounds.NAME_BYTES:
        return None
    try:
        epoch, seq = int(headers.get("source-epoch", b"0")), int(headers["source-seq"])
    except (KeyError, TypeError, ValueError):
        return None
    if not (0 <= epoch <= bounds.VERSION and 0 <= seq <= bounds.VERSION):
        return None
    return source.decode("utf-8", "backslashreplace"), (epoch, seq)
