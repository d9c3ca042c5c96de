"""A slot's state against a plain model, its changelog, and what it must not log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.errors import StageError, TooLargeError
from millrace.infra.log.base import Record
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.stages.state import KEY_BYTES, SlotState

KEYS = ["a", "a/0", "a/1", "b/", "b", "0", "c"]
VALUES = st.one_of(st.none(), st.integers(-5, 5), st.binary(max_size=3), st.lists(st.text(max_size=2), max_size=2))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(KEYS), VALUES),
        st.tuples(st.just("append"), st.sampled_from(KEYS), VALUES),
        st.tuples(st.just("clear"), st.sampled_from(KEYS), st.none()),
        st.tuples(st.just("wake"), st.sampled_from(KEYS), st.one_of(st.none(), st.integers(0, 9))),
        st.tuples(st.just("due"), st.just(""), st.integers(0, 9)),
        st.tuples(st.just("turn"), st.just(""), st.none()),
    ),
    max_size=60,
)


class Log:
    """A changelog partition in a list, with the cleaner on request."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def take(self, state: SlotState) -> int:
        changes = list(state.changes())
        for key, value in changes:
            self.records.append(Record("changelog", 0, len(self.records), key, value, {}, 0))
        return len(changes)

    def compacted(self) -> list[Record]:
        newest = {record.key: record for record in self.records}
        return [r for r in self.records if newest[r.key] is r and r.value is not None]


@given(STEPS)
def test_a_state_is_its_model_and_comes_back_from_its_changelog(steps: list[tuple[str, str, Any]]) -> None:
    state, log = SlotState(3), Log()
    values: dict[str, Any] = {}
    items: dict[str, list[Any]] = {}
    wakes: dict[str, int] = {}
    for kind, key, value in [*steps, ("turn", "", None)]:
        match kind:
            case "put":
                state.put(key, value)
                values[key] = value
            case "append":
                state.append(key, value)
                items.setdefault(key, []).append(value)
            case "clear":
                state.clear(key)
                values.pop(key, None), items.pop(key, None), wakes.pop(key, None)
            case "wake":
                state.wake(key, value)
                wakes.pop(key, None) if value is None else wakes.update({key: value})
            case "due":
                first = min(((at, k) for k, at in wakes.items() if at <= value), default=None)
                assert state.take_due(value) == (first and first[1])
                wakes.pop(first[1] if first else "", None)
            case "turn":
                log.take(state)
                for changelog in (log.records, log.compacted()):
                    assert SlotState.restore(3, changelog).snapshot() == state.snapshot()
        for name in KEYS:
            assert state.get(name) == values.get(name)
            assert list(state.items(name)) == items.get(name, [])
        assert state.keys() == sorted(values.keys() | items.keys())
        assert state.keys("a") == sorted(k for k in values.keys() | items.keys() if k.startswith("a"))
        assert state.next_wake() == min(wakes.values(), default=None)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(KEYS), VALUES),
        st.tuples(st.just("append"), st.sampled_from(KEYS), VALUES),
        st.tuples(st.just("clear"), st.sampled_from(KEYS), st.none()),
        st.tuples(st.just("wake"), st.sampled_from(KEYS), st.one_of(st.none(), st.integers(0, 9))),
        st.tuples(st.just("read"), st.sampled_from(KEYS), st.none()),
    ),
    max_size=12,
)


def do(state: SlotState, kind: str, key: str, value: Any) -> None:
    match kind:
        case "put":
            state.put(key, value)
        case "append":
            state.append(key, value)
        case "clear":
            state.clear(key)
        case "wake":
            state.wake(key, value)
        case "read":
            state.get(key), state.items(key), state.keys()
        case "turn":
            list(state.changes())


@given(st.lists(st.tuples(st.sampled_from(["keep", "undo", "turn"]), OPERATIONS), max_size=8))
def test_what_is_undone_never_happened(parts: list[tuple[str, list[tuple[str, str, Any]]]]) -> None:
    """One state lives through what is undone, its twin never met it: both are, read and log the same ever after."""
    state, twin = SlotState(3), SlotState(3)
    logs = Log(), Log()
    for end, operations in [*parts, ("turn", [])]:
        state.begin()
        for operation in operations:
            do(state, *operation)
        if end == "undo":
            state.undo()
        else:
            state.keep()
            for operation in operations:
                do(twin, *operation)
        if end == "turn":
            logs[0].take(state), logs[1].take(twin)
            ours, theirs = ({(r.key, r.value) for r in log.compacted()} for log in logs)
            assert ours == theirs
            assert len(logs[0].records) == len(logs[1].records)
        assert state.snapshot() == twin.snapshot()
        assert (state.keys(), state.next_wake()) == (twin.keys(), twin.next_wake())
        for key in KEYS:
            assert (state.get(key), state.items(key)) == (twin.get(key), twin.items(key))
    assert SlotState.restore(3, logs[0].records).snapshot() == twin.snapshot()


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, "\ud800", object(), {1: 2, "a": {"b": 2**70}}])
def test_what_cannot_be_logged_is_refused_before_anything_changes(value: Any) -> None:
    state = SlotState(0)
    state.put("k", 1)
    before = state.snapshot()
    for refused in (state.put, state.append):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            refused("k", value)
        with pytest.raises((TypeError, ValueError, OverflowError)):
            refused("new", value)
    for key in ("\ud800", "k" * (KEY_BYTES + 1)):
        for operation in ("put", "append", "wake"):
            with pytest.raises((UnicodeEncodeError, TooLargeError)):
                do(state, operation, key, 1)
    with pytest.raises(OverflowError):
        state.wake("k", 2**63)
    assert state.snapshot() == before
    assert state.keys() == ["k"]


def test_a_value_too_large_for_its_topic_comes_back_from_behind_its_claim(tmp_path: Path) -> None:
    store, state = ClaimStore(str(tmp_path)), SlotState(0)
    state.put("k", "x" * 1_000_000)
    state.append("k", "y" * 1_000_000)
    state.wake("k", 5)
    log = [
        Record("changelog", 0, n, key, store.fitting("Change", value or b""), {}, 0)
        for n, (key, value) in enumerate(state.changes())
    ]
    assert all(len(record.value or b"") < 1000 for record in log)
    assert SlotState.restore(0, log, claims=store).snapshot() == state.snapshot()


def test_what_lives_and_dies_in_one_turn_is_not_logged() -> None:
    state, log = SlotState(0), Log()
    state.put("k", 1)
    state.append("k", b"x" * 1000)
    state.wake("k", 5)
    state.clear("k")
    assert log.take(state) == 0


def test_items_are_logged_once() -> None:
    state, log = SlotState(0), Log()
    for n in range(5):
        state.append("k", n)
        assert log.take(state) == 1
    state.put("k", "v")
    state.put("k", "v")
    assert log.take(state) == 1
    state.put("k", "v")
    assert log.take(state) == 0
    state.clear("k")
    assert log.take(state) == 6
    assert log.compacted() == []


def test_values_are_what_a_restored_slot_would_see() -> None:
    state = SlotState(0)
    state.put("k", {"t": (1, 2), "b": b"raw"})
    assert state.get("k") == {"t": [1, 2], "b": b"raw"}


def test_a_mutated_value_is_found() -> None:
    state = SlotState(0, strict=True)
    state.put("k", [1])
    list(state.changes())
    found = state.get("k")
    assert found is not None
    found.append(2)
    with pytest.raises(StageError, match="mutated"):
        list(state.changes())


def test_a_mutated_item_is_found() -> None:
    state = SlotState(0, strict=True)
    state.append("k", [1])
    state.items("k")[0].append(2)
    with pytest.raises(StageError, match="mutated"):
        list(state.changes())


def test_missing_items_are_not_passed_over() -> None:
    state, log = SlotState(0), Log()
    for n in range(3):
        state.append("k", n)
    log.take(state)
    with pytest.raises(StageError, match="lacks items"):
        SlotState.restore(0, [r for r in log.records if r.key != b"0/k/1"])
