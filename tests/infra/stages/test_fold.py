"""Time, timers, duplicates and refs of one turn; and that where turns are cut does not matter."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.errors import StageError
from millrace.infra.log.base import Record
from millrace.infra.stages.base import Clear, Emit, Op, Put, Stage, View, Wake
from millrace.infra.stages.fold import Fold
from millrace.infra.stages.state import SlotState


def record(offset: int, key: str = "k", *, topic: str = "ns.in", value: bytes = b"", **headers: object) -> Record:
    head = {name.replace("_", "-"): str(text).encode() for name, text in headers.items()}
    return Record(topic, 0, offset, key.encode(), value, head, 0)


class Script(Stage):
    """Does what its record's value says, in Python; notes each wake."""

    name = "script"
    primary = "in"
    sides = ("side",)

    def time_of(self, view: View, record: Record) -> int | None:
        return int(record.headers["time"]) if "time" in record.headers else None

    def on_record(self, view: View, record: Record, now: int) -> Iterable[Op]:
        yield from eval(record.value or b"[]", {"Put": Put, "Wake": Wake, "Clear": Clear, "now": now})

    def on_wake(self, view: View, key: str, now: int) -> Iterable[Op]:
        if key.startswith("loop"):
            yield Wake(key, now)
        yield Emit("out", key, "Progress", {"stage": key, "slot": 0, "time": now})


def fired(fold: Fold, *records: Record) -> list[tuple[str, int]]:
    return [(emit.key, emit.record["time"]) for _, emit in fold.turn(records, None).emits]


def test_wakes_fire_in_order_of_time_then_key_before_the_record_that_brings_the_time() -> None:
    fold = Fold(Script(), SlotState(0))
    wakes = b"[Wake('b', 5), Wake('a', 5), Wake('c', 3), Wake('late', 9)]"
    assert fired(fold, record(0, value=wakes, time=1)) == []
    assert fired(fold, record(1, time=4), record(2, time=6), record(3, time=2)) == [("c", 4), ("a", 6), ("b", 6)]
    assert fold.now == 6


def test_a_wake_for_a_time_that_has_come_fires_at_once_and_once() -> None:
    fold = Fold(Script(), SlotState(0))
    assert fired(fold, record(0, value=b"[Wake('now', now)]", time=7), record(1, time=8)) == [("now", 7)]


def test_a_wake_is_moved_cancelled_and_forgotten_with_its_key() -> None:
    fold = Fold(Script(), SlotState(0))
    wakes = b"[Wake('a', 5), Wake('b', 5), Wake('c', 5), Wake('a', 8), Wake('b', None), Clear('c')]"
    assert fired(fold, record(0, value=wakes, time=1), record(1, time=6)) == []
    assert fired(fold, record(2, time=9)) == [("a", 9)]


def test_an_endless_wake_is_refused() -> None:
    with pytest.raises(StageError, match="endlessly"):
        fired(Fold(Script(), SlotState(0), isolate=False), record(0, value=b"[Wake('loop', now)]"))


def test_the_runners_keys_are_its_own() -> None:
    with pytest.raises(StageError, match="runner's"):
        fired(Fold(Script(), SlotState(0), isolate=False), record(0, value=b"[Put('~slot', 1)]"))


def test_numbered_records_are_folded_once_and_others_always() -> None:
    fold = Fold(Script(), SlotState(0))
    numbers = [("g", 0, 5), ("g", 0, 5), ("g", 0, 4), ("h", 0, 5), ("g", 0, 7), ("g", 1, 0), ("g", 0, 8)]
    turn = fold.turn(
        [record(n, source=s, source_epoch=e, source_seq=q) for n, (s, e, q) in enumerate(numbers)]
        + [record(7), record(8, source="g"), record(9, source="g", source_seq="x")],
        None,
    )
    assert (turn.records, turn.duplicates) == (7, 3)
    assert [(r["first"], r["last"], r["count"], r["skipped"]) for r in turn.ranges] == [(0, 9, 7, 3)]


def test_sides_are_never_duplicates_and_their_positions_are_kept() -> None:
    fold = Fold(Script(), SlotState(0))
    twice = [record(n, topic="ns.side", source="g", source_seq=1) for n in (3, 7)]
    turn = fold.turn([*twice, record(0)], None)
    assert (turn.records, turn.duplicates) == (3, 0)
    assert [r["topic"] for r in turn.ranges] == ["side", "in"]
    assert fold.sides == {"side": 8}
    assert Fold(Script(), fold.state).sides == {"side": 8}


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_where_turns_are_cut_does_not_matter(seed: int, size: int) -> None:
    chooser = random.Random(seed)
    records = []
    for n in range(30):
        key = chooser.choice("abc")
        value = chooser.choice(["[]", f"[Wake('{key}', now + 3)]", f"[Put('{key}', now)]", f"[Clear('{key}')]"])
        head = {"source": key, "source_seq": chooser.randrange(8), "time": chooser.randrange(40)}
        records.append(record(n, key, value=value.encode(), **head))
    whole, cut = Fold(Script(), SlotState(0)), Fold(Script(), SlotState(0))
    expected = fired(whole, *records)
    assert [f for at in range(0, 30, size) for f in fired(cut, *records[at : at + size])] == expected
    after, again = whole.state.snapshot(), cut.state.snapshot()
    assert after.pop("values").keys() == again.pop("values").keys()
    assert after == again
    assert whole.now == cut.now
