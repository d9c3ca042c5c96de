"""A record or wake is folded whole or not at all, and what cannot be folded stops nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.errors import StorageError
from millrace.infra.log.base import Record
from millrace.infra.stages.base import TICK, Append, Clear, Emit, Later, Op, Put, Stage, View, Wake
from millrace.infra.stages.fold import Fold, FoldedTurn
from millrace.infra.stages.letters import UNFOLDABLE
from millrace.infra.stages.outbox import BESIDE_BYTES
from millrace.infra.stages.state import KEY_BYTES, SlotState
from millrace.schemas import bounds

KEYS = ("a", "b", "c")


class Boom(Exception):
    """What the script raises."""


class Script(Stage):
    """Yields the operations of the record it is given, by name; an exception among them is raised."""

    name = "script"
    primary = "in"
    sides = ("side",)

    def __init__(self, scripts: Mapping[str, Iterable[Op | Exception]], clock: bool = False) -> None:
        self.scripts, self.clock = scripts, clock
        self.ended: list[str] = []

    def time_of(self, view: View, record: Record) -> int | None:
        if record.headers.get("time") == b"odd":
            raise Boom
        return int(record.headers["time"]) if "time" in record.headers else None

    def on_record(self, view: View, record: Record, now: int) -> Iterable[Op]:
        yield from self._play(record.key.decode())

    def on_wake(self, view: View, key: str, now: int) -> Iterable[Op]:
        yield from self._play(f"wake {key}")

    def on_unfoldable(self, view: View, key: str, now: int) -> Iterable[Op]:
        self.ended.append(key)
        yield from self._play(f"end {key}")

    def ids_of(self, view: View, what: Record | str) -> Mapping[str, Any]:
        if self.scripts.get("nameless"):
            raise Boom
        return {"tenant": "alice", "group": "g" * 5000}

    def _play(self, name: str) -> Iterable[Op]:
        for op in self.scripts.get(name, ()):
            if isinstance(op, Exception):
                raise op
            yield op


def record(offset: int, key: str, *, topic: str = "ns.in", **headers: object) -> Record:
    head = {name.replace("_", "-"): str(text).encode() for name, text in headers.items()}
    return Record(topic, 0, offset, key.encode(), b"", head, 0)


def progress(stage: str = "s", time: int = 0, **more: Any) -> Emit:
    return Emit("out", more.pop("key", "k"), "Progress", {"stage": stage, "slot": 0, "time": time}, **more)


def letters(folded: FoldedTurn) -> list[tuple[int, str]]:
    """(offset, detail) of every dead letter."""
    found = [emit.record for _, emit in folded.emits if emit.topic == "dead-letters"]
    assert all(letter["reason"] == UNFOLDABLE for letter in found)
    return [(letter["place"]["offset"], letter["detail"]) for letter in found]


def sent(folded: FoldedTurn) -> list[str]:
    return [emit.record["stage"] for _, emit in folded.emits if emit.topic == "out"]


OPERATION = st.one_of(
    st.builds(Put, st.sampled_from(KEYS), st.integers(0, 3)),
    st.builds(Append, st.sampled_from(KEYS), st.integers(0, 3)),
    st.builds(Clear, st.sampled_from(KEYS)),
    st.builds(Wake, st.sampled_from(KEYS), st.one_of(st.none(), st.integers(0, 30))),
    st.builds(progress, st.sampled_from(KEYS)),
)
ODD: dict[str, Op | Exception] = {
    "raises": Boom(),
    "recursion": RecursionError(),
    "a value beyond 64 bits": Put("a", 2**64),
    "a value with half a surrogate": Put("a", "\ud800"),
    "an item that is no data": Append("a", object()),
    "a key with half a surrogate": Put("\ud800", 1),
    "a long key": Put("k" * (KEY_BYTES + 1), 1),
    "a timer beyond 64 bits": Wake("a", 2**63),
    "a key of the runner": Put("~slot", 1),
    "a number beyond 64 bits": progress(time=2**63),
    "a text with half a surrogate": progress(stage="\ud800"),
    "an emit's key with half a surrogate": progress(key="\ud800"),
    "an emit's long key": progress(key="k" * (BESIDE_BYTES + 1)),
    "long headers": progress(headers={"h": "x" * BESIDE_BYTES}),
    "a foreign record": Emit("out", "k", "NoSuchRecord", {}),
    "nobody's place": Emit("out", "k", "Progress", {"stage": Later("nobody"), "slot": 0, "time": 0}),
}
STEP = st.tuples(st.integers(0, 20), st.lists(OPERATION, max_size=5), st.sampled_from(["", "", *ODD]))
Step = tuple[int, list[Op], str]


def scripts_of(steps: list[Step]) -> dict[str, list[Op | Exception]]:
    return {str(n): [*ops, *([ODD[odd]] if odd else [])] for n, (_, ops, odd) in enumerate(steps)}


@given(st.lists(STEP, max_size=10), st.integers(1, 4))
def test_what_cannot_be_folded_leaves_no_trace_but_its_letter(steps: list[Step], size: int) -> None:
    """One fold meets good records and bad ones, its twin empty records in the place of the bad."""
    bad = {n for n, (_, _, odd) in enumerate(steps) if odd}
    scripts = scripts_of(steps)
    twins = {name: [] if int(name) in bad else script for name, script in scripts.items()}
    records = [record(n, str(n), time=time) for n, (time, *_) in enumerate(steps)]
    ours, theirs = Fold(Script(scripts), SlotState(0)), Fold(Script(twins), SlotState(0))
    for at in range(0, len(records), size):
        folded, expected = (fold.turn(records[at : at + size], None) for fold in (ours, theirs))
        assert [offset for offset, _ in letters(folded)] == sorted(bad & set(range(at, at + size)))
        assert sent(folded) == sent(expected)
        assert len(folded.encodings) == len(folded.emits)
        assert ours.state.snapshot() == theirs.state.snapshot()
        assert {*ours.state.changes()} == {*theirs.state.changes()}


@given(st.lists(STEP, max_size=8))
def test_a_turn_that_is_folded_again_comes_to_the_same(steps: list[Step]) -> None:
    scripts = scripts_of(steps)
    records = [record(n, str(n), time=n) for n in range(len(steps))]
    once, again = (Fold(Script(scripts), SlotState(0)).turn(records, None) for _ in range(2))
    assert (once.emits, once.encodings, once.ranges) == (again.emits, again.encodings, again.ranges)


def test_a_letter_names_the_kind_of_the_error_and_nothing_that_it_says() -> None:
    folded = Fold(Script({"x": [Boom("a secret")]}), SlotState(0)).turn([record(7, "x")], None)
    (letter,) = (emit.record for _, emit in folded.emits)
    assert letter["detail"] == "folding it raised Boom"
    assert letter["tenant"] == "alice"
    assert letter["group"].startswith("sha256:")
    assert letter["place"] == {"topic": "ns.in", "partition": 0, "offset": 7}
    (failure,) = folded.failures
    assert failure[:2] == ("ns.in[0]@7", "Boom")
    assert "secret" not in str(folded)


def test_a_stage_that_cannot_even_name_the_record_stops_nothing() -> None:
    folded = Fold(Script({"nameless": [Boom()], "x": [Boom()]}), SlotState(0)).turn(
        [record(0, "x"), record(1, "y")], None
    )
    assert letters(folded) == [(0, "folding it raised Boom")]


@pytest.mark.parametrize("time", ["odd", bounds.TIME + 1, -bounds.TIME - 1, "12x"])
def test_a_record_whose_time_is_odd_moves_no_time(time: object) -> None:
    fold = Fold(Script({"x": [progress()], "first": [Wake("a", 9)]}), SlotState(0))
    folded = fold.turn([record(0, "first", time=5), record(1, "x", time=time), record(2, "x", time=6)], None)
    assert [offset for offset, _ in letters(folded)] == [1]
    assert (fold.now, sent(folded)) == (6, ["s"])


def test_a_wake_that_raises_fires_once_and_the_stage_ends_what_waited() -> None:
    scripts = {
        "x": [Put("a", 1), Wake("a", 3)],
        "wake a": [Put("b", 1), Boom()],
        "end a": [Clear("a"), progress("end")],
    }
    stage = Script(scripts)
    fold = Fold(stage, SlotState(2), namespace="ns")
    folded = fold.turn([record(0, "x", time=1), record(1, "y", time=4), record(2, "y", time=9)], None)
    assert (stage.ended, sent(folded)) == (["a"], ["end"])
    assert letters(folded) == [(-1, "a timer of the state raised Boom")]
    assert folded.emits[0][1].record["place"] == {"topic": "ns.changelog.script", "partition": 2, "offset": -1}
    assert fold.state.keys() == []
    assert fold.state.next_wake() is None


def test_a_wake_whose_end_raises_too_stops_nothing() -> None:
    scripts = {"x": [Wake("a", 3)], "wake a": [Boom()], "end a": [Put("c", 1), Boom()], "y": [progress()]}
    fold = Fold(Script(scripts), SlotState(0))
    folded = fold.turn([record(0, "x", time=1), record(1, "y", time=4)], None)
    assert [detail for _, detail in letters(folded)] == ["a timer of the state raised Boom"]
    assert sent(folded) == ["s"]
    assert fold.state.keys() == []


def test_letters_of_two_timers_at_one_time_are_two() -> None:
    scripts = {"x": [Wake("a", 3), Wake("b", 3)], "wake a": [Boom()], "wake b": [Boom()]}
    folded = Fold(Script(scripts), SlotState(0)).turn([record(0, "x", time=1), record(1, "y", time=4)], None)
    assert len({emit.record["id"] for _, emit in folded.emits}) == 2


def test_an_endless_wake_ends() -> None:
    scripts = {"x": [Wake("a", 3)], "wake a": [Wake("a", 3)], "end a": [Wake("a", 3)], "y": [progress()]}
    fold = Fold(Script(scripts), SlotState(0))
    folded = fold.turn([record(0, "x", time=1), record(1, "y", time=4)], None)
    assert letters(folded) == [(-1, "a timer of the state raised StageError")]
    assert sent(folded) == ["s"]
    assert fold.state.next_wake() is None


def test_a_tick_that_raises_comes_again_with_the_next_second() -> None:
    fold = Fold(Script({f"wake {TICK}": [Boom()]}, clock=True), SlotState(0))
    assert [len(letters(fold.turn([], clock))) for clock in (1, 2, 1_000_000, 1_500_000, 2_000_000)] == [1, 0, 1, 0, 1]


def test_an_odd_side_record_is_passed_and_told_by_each_slot() -> None:
    ids = set()
    for slot in range(2):
        fold = Fold(Script({"x": [Boom()]}), SlotState(slot))
        folded = fold.turn([record(3, "x", topic="ns.side"), record(0, "y")], None)
        assert letters(folded) == [(3, "folding it raised Boom")]
        assert fold.sides == {"side": 4}
        ids.add(folded.emits[0][1].record["id"])
    assert len(ids) == 2


@pytest.mark.parametrize("error", [OSError("disk"), MemoryError(), StorageError("away")])
def test_trouble_of_the_machine_blames_no_record(error: Exception) -> None:
    with pytest.raises(type(error)):
        Fold(Script({"x": [error]}), SlotState(0)).turn([record(0, "x")], None)


def numbered(offset: int, key: str, seq: object) -> Record:
    return record(offset, key, source="gateway", source_seq=seq)


def refusal(offset: int) -> Emit:
    place = {"topic": "ns.in", "partition": 0, "offset": offset}
    return Emit("dead-letters", "k", "DeadLetter", {"id": "i", "stage": "script", "place": place} | WORDS)


WORDS = {"reason": UNFOLDABLE, "detail": "", "event_id": None, "policy": None, "tenant": None, "group": None} | {
    "trajectory": None,
    "time": 0,
}


@pytest.mark.parametrize(
    ("script", "taken"),
    [([Boom()], False), ([refusal(0)], False), ([refusal(0), Put("a", 1)], True), ([refusal(9)], True), ([], True)],
)
def test_only_what_the_stage_took_moves_a_mark(script: list[Op | Exception], taken: bool) -> None:
    """Else one forged record with a high number would make a stage skip all that its source sends."""
    folded = Fold(Script({"forged": script, "real": [progress()]}), SlotState(0)).turn(
        [numbered(0, "forged", 10**15), numbered(1, "real", 1)], None
    )
    assert sent(folded) == ([] if taken else ["s"])
    assert folded.duplicates == int(taken)


@pytest.mark.parametrize("seq", [-1, 2**53 + 1, 10**30, "9" * 5000, "x", ""])
def test_a_number_out_of_bounds_is_none(seq: object) -> None:
    fold = Fold(Script({"x": [progress()]}), SlotState(0))
    folded = fold.turn([numbered(0, "x", seq), numbered(1, "x", seq), numbered(2, "x", 1)], None)
    assert (len(sent(folded)), folded.duplicates) == (3, 0)


def test_a_source_with_an_endless_name_has_no_mark() -> None:
    fold = Fold(Script({}), SlotState(0))
    folded = fold.turn([record(n, "x", source="g" * 2000, source_seq=1) for n in range(2)], None)
    assert folded.duplicates == 0
    assert not [*fold.state.runner_values("~source/")]
