"""What one slot knows: values, appended items and timers, and the changelog records that bring them back.

Invariants:

- Values are kept as the msgpack bytes that the changelog holds and decoded on first use, so a restored slot and a live
  one see the same objects.
- A turn changes the state in place; `changes` then says what to log, once. A turn whose transaction did not commit is
  undone by dropping the state and restoring it, never by hand.
- Between `begin` and `undo` nothing happened: values, items and timers are what they were, to the byte.
- What the changelog could not hold is refused by the operation that brings it, before anything has changed.
- What a turn creates and clears again is never logged; what did not change is not logged either.
- Changelog keys: `slot/key/` for a value with its timer, `slot/key/n` for item n, so no two things share a key.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from millrace.infra.errors import StageError, TooLargeError
from millrace.infra.log.base import Record
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.stages.base import Key
from millrace.schemas import codec
from millrace.schemas.records import Change

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

RUNNER_PREFIX = "~"
"""first character of the runner's own keys"""
KEY_BYTES = 16 << 10
"""UTF-8 bytes of a key: it is part of a changelog record's key, which no claim can stand for"""
_INT64 = 1 << 63


class _Items:
    """What was appended to one key."""

    __slots__ = ("logged", "objects", "raws", "stale")

    def __init__(self) -> None:
        self.raws: list[bytes] = []
        self.objects: list[Any] = []
        """decoded so far, a prefix of raws"""
        self.logged = 0
        """how many of raws the changelog has"""
        self.stale = 0
        """how many item keys the changelog has that may have to go"""


class SlotState:
    """One slot's state. It is the `View` that stages read; the runner alone writes."""

    def __init__(self, slot: int, *, strict: bool = False) -> None:
        """`strict` finds values that a stage mutated (StageError at the end of the turn); it costs an encode a read."""
        self._slot = slot
        self._strict = strict
        self._values: dict[str, bytes] = {}
        self._objects: dict[str, Any] = {}
        self._items: dict[str, _Items] = {}
        self._wakes: dict[str, int] = {}
        self._due: list[tuple[int, str]] = []
        self._names: list[str] = []
        self._before: dict[str, tuple[bytes | None, int | None]] = {}
        self._appended: dict[str, _Items] = {}
        self._read: set[str] = set()
        self._undo: list[Callable[[], object]] | None = None
        """how to take back each operation since `begin`, in their order"""

    # -- the stage's side

    @property
    def slot(self) -> int:
        return self._slot

    def get(self, key: Key[T]) -> T | None:
        try:
            item = self._objects[key]
        except KeyError:
            raw = self._values.get(key)
            if raw is None:
                return None
            item = self._objects[key] = _decode(raw)
        if self._strict:
            self._read.add(key)
        value: T = item
        return value

    def items(self, key: Key[T]) -> Sequence[T]:
        entry = self._items.get(key)
        if entry is None:
            return ()
        if len(entry.objects) < len(entry.raws):
            entry.objects.extend(_decode(raw) for raw in entry.raws[len(entry.objects) :])
        if self._strict:
            self._read.add(key)
        return tuple(entry.objects)

    def keys(self, prefix: str = "") -> list[str]:
        at = bisect_left(self._names, prefix)
        names = []
        while at < len(self._names) and self._names[at].startswith(prefix):
            names.append(self._names[at])
            at += 1
        return names

    # -- the runner's side

    def begin(self) -> None:
        """What follows is one record or one wake: `undo` takes it back, `keep` lets it stand."""
        self._undo = []

    def keep(self) -> bool:
        """Let stand what happened since `begin`; whether anything did."""
        has_changed = bool(self._undo)
        self._undo = None
        return has_changed

    def undo(self) -> None:
        """Take back what happened since `begin`."""
        for step in reversed(self._undo or ()):
            step()
        self._undo = None

    def put(self, key: str, value: object) -> None:
        """Set a value. Raises what its encoding raises, and TooLargeError for a key that the changelog cannot hold."""
        raw = _encode(value)
        former = self._values.get(key)
        if raw == former:
            return
        _check_key(key)
        is_new = former is None and key not in self._items and not key.startswith(RUNNER_PREFIX)
        if self._undo is not None:
            self._undo.append(lambda: self._take_back(key, former, is_new))
        self._touch(key)
        if is_new:
            insort(self._names, key)
        self._values[key] = raw
        self._objects.pop(key, None)

    def _take_back(self, key: str, former: bytes | None, is_new: bool) -> None:
        self._objects.pop(key, None)
        if former is None:
            del self._values[key]
        else:
            self._values[key] = former
        if is_new:
            del self._names[bisect_left(self._names, key)]

    def append(self, key: str, value: object) -> None:
        """Append an item. Raises like `put`."""
        raw = _encode(value)
        _check_key(key)
        entry = self._items.get(key)
        first = entry is None
        is_new = first and key not in self._values
        if entry is None:
            if is_new:
                insort(self._names, key)
            entry = self._items[key] = self._appended.get(key) or _Items()
        self._appended[key] = entry
        entry.raws.append(raw)
        if self._undo is not None:
            self._undo.append(lambda: self._cut(key, first, is_new))

    def _cut(self, key: str, first: bool, is_new: bool) -> None:
        entry = self._items[key]
        entry.raws.pop()
        del entry.objects[len(entry.raws) :]
        if first:
            del self._items[key]
        if is_new:
            del self._names[bisect_left(self._names, key)]

    def clear(self, key: str) -> None:
        """Forget the value, the items and the timer of a key."""
        raw, at, entry = self._values.get(key), self._wakes.get(key), self._items.get(key)
        if self._undo is not None:
            former = None if entry is None else (entry.raws, entry.objects, entry.logged, entry.stale)
            self._undo.append(lambda: self._bring_back(key, raw, at, entry, former))
        self._touch(key)
        self._values.pop(key, None)
        self._objects.pop(key, None)
        self._wakes.pop(key, None)
        self._items.pop(key, None)
        if entry is not None:
            entry.stale = max(entry.stale, entry.logged)
            entry.logged = 0
            entry.raws, entry.objects = [], []
            self._appended[key] = entry
        if raw is not None or entry is not None:
            del self._names[bisect_left(self._names, key)]

    def _bring_back(
        self,
        key: str,
        raw: bytes | None,
        at: int | None,
        entry: _Items | None,
        former: tuple[list[bytes], list[Any], int, int] | None,
    ) -> None:
        if raw is not None:
            self._values[key] = raw
        self._set_timer(key, at)
        if entry is not None and former is not None:
            entry.raws, entry.objects, entry.logged, entry.stale = former
            self._items[key] = entry
        if raw is not None or entry is not None:
            insort(self._names, key)

    def wake(self, key: str, at: int | None) -> None:
        """Set or cancel a timer. Raises OverflowError for a time that no record can hold."""
        if at is not None and not -_INT64 <= at < _INT64:
            raise OverflowError("a timer must fit 64 bits")
        _check_key(key)
        if self._undo is not None:
            before = self._wakes.get(key)
            self._undo.append(lambda: self._set_timer(key, before))
        self._touch(key)
        self._set_timer(key, at)

    def _set_timer(self, key: str, at: int | None) -> None:
        if at is None:
            self._wakes.pop(key, None)
        else:
            self._wakes[key] = at
            heapq.heappush(self._due, (at, key))

    def timer(self, key: str) -> int | None:
        """When the timer of a key is due."""
        return self._wakes.get(key)

    def take_due(self, now: int) -> str | None:
        """The key of the earliest timer at or before `now`, whose timer is taken; None when there is none."""
        while self._due and self._due[0][0] <= now:
            at, key = heapq.heappop(self._due)
            if self._wakes.get(key) == at:
                self._touch(key)
                del self._wakes[key]
                return key
        return None

    def next_wake(self) -> int | None:
        """Micros of the earliest timer."""
        while self._due and self._wakes.get(self._due[0][1]) != self._due[0][0]:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def runner_values(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """The runner's own values under a prefix."""
        return ((key, _decode(raw)) for key, raw in self._values.items() if key.startswith(prefix))

    def _touch(self, key: str) -> None:
        if key not in self._before:
            self._before[key] = (self._values.get(key), self._wakes.get(key))

    # -- the changelog

    def changes(self) -> Iterator[tuple[bytes, bytes | None]]:
        """(key, value) of every changelog record that the turn needs; ends the turn. Run it to its end.

        Raises StageError in strict mode when the stage mutated what it read."""
        if self._strict:
            self._check_reads()
        slot = self._slot
        for key, before in self._before.items():
            value, at = self._values.get(key), self._wakes.get(key)
            if (value, at) == before:
                continue
            name = f"{slot}/{key}/".encode()
            if value is None and at is None:
                yield name, None
            else:
                yield name, codec.encode("Change", {"slot": slot, "key": key, "item": None, "value": value, "wake": at})
        for key, items in self._appended.items():
            for n in range(items.logged, len(items.raws)):
                change: Change = {"slot": slot, "key": key, "item": n, "value": items.raws[n], "wake": None}
                yield f"{slot}/{key}/{n}".encode(), codec.encode("Change", change)
            for n in range(len(items.raws), items.stale):
                yield f"{slot}/{key}/{n}".encode(), None
            items.logged, items.stale = len(items.raws), 0
        self._before.clear()
        self._appended.clear()

    def settle(self) -> None:
        """End the turn as `changes` does, for a fold that logs nothing."""
        for items in self._appended.values():
            items.logged, items.stale = len(items.raws), 0
        self._before.clear()
        self._appended.clear()

    def _check_reads(self) -> None:
        for key in self._read:
            is_mutated = key in self._objects and _encode(self._objects[key]) != self._values[key]
            items = self._items.get(key)
            if items is not None:
                is_mutated |= any(_encode(o) != raw for o, raw in zip(items.objects, items.raws, strict=False))
            if is_mutated:
                raise StageError(
                    f"the stage mutated what it read under {key!r}: yield a Put with a changed copy instead"
                )
        self._read.clear()

    def snapshot(self) -> dict[str, Any]:
        """Everything the slot knows, as bytes, for comparisons."""
        items = {key: list(entry.raws) for key, entry in self._items.items()}
        return {"values": dict(self._values), "items": items, "wakes": dict(self._wakes)}

    @classmethod
    def restore(
        cls, slot: int, changelog: Iterable[Record], *, claims: ClaimStore | None = None, strict: bool = False
    ) -> SlotState:
        """The state that a changelog partition describes. Raises StageError when items are missing from it, ClaimError
        when the bytes behind a claim are."""
        latest: dict[bytes, bytes | None] = {}
        for record in changelog:
            if record.value is None:
                latest.pop(record.key, None)
            else:
                latest[record.key] = record.value
        state = cls(slot, strict=strict)
        items: dict[str, dict[int, bytes]] = {}
        for data in latest.values():
            assert data is not None
            change = codec.decode_as("Change", data if claims is None else claims.behind(data))
            key = change["key"]
            if change["item"] is not None:
                items.setdefault(key, {})[change["item"]] = change["value"] or b""
                continue
            if change["value"] is not None:
                state._values[key] = change["value"]
            if change["wake"] is not None:
                state._wakes[key] = change["wake"]
        for key, raws in items.items():
            if sorted(raws) != list(range(len(raws))):
                raise StageError(f"the changelog of slot {slot} lacks items of {key!r}: restore the topic from a copy")
            entry = state._items[key] = _Items()
            entry.raws = [raws[n] for n in range(len(raws))]
            entry.logged = len(entry.raws)
        state._due = sorted((at, key) for key, at in state._wakes.items())
        state._names = sorted({key for key in (*state._values, *state._items) if not key.startswith(RUNNER_PREFIX)})
        return state


def _check_key(key: str) -> None:
    if len(key.encode()) > KEY_BYTES:
        raise TooLargeError(f"a key of the state is longer than {KEY_BYTES} bytes: bound the names in it")
