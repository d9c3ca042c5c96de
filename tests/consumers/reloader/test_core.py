"""The reloader's decisions, without engine or log."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.consumers.reloader.core import Condemn, Idle, ReloaderState, Swap
from millrace.infra.engines.control import EngineState


def machine(*versions: int, label: str = "default", paused: bool = False) -> ReloaderState:
    made = ReloaderState("policy")
    learn(made, *versions)
    made.see(EngineState("1", label, paused))
    return made


def learn(made: ReloaderState, *versions: int) -> None:
    for version in versions:
        event: Any = {"version": version}
        made.learn(event)


def test_nothing_is_done_before_engine_and_event() -> None:
    made = ReloaderState("policy")
    assert made.next(0) == Idle()
    learn(made, 0)
    assert made.next(0) == Idle()
    made.see(EngineState("1", "default", False))
    assert made.next(0) == Swap(0)


def test_only_the_newest_is_loaded() -> None:
    made = machine(0, 1, 2, 5)
    assert made.next(0) == Swap(5)
    made.note_load(5)
    assert made.next(0) == Idle()
    learn(made, 3, 4)
    assert made.next(0) == Idle()
    learn(made, 6)
    assert made.next(0) == Swap(6)


def test_an_unfit_directory_makes_room_for_the_next_newest_and_is_tried_again_later() -> None:
    made = machine(0, 1)
    made.unfit(1, "gone", now=10)
    assert made.next(10) == Swap(0)
    made.note_load(0)
    assert made.error == "version 1: gone"
    assert made.next(10.5) == Idle()
    assert made.next(11) == Swap(1)
    made.unfit(1, "gone", now=11)
    assert made.next(12.5) == Idle()
    assert made.next(13) == Swap(1)
    made.note_load(1)
    assert made.error is None


def test_after_a_failed_load_the_last_good_one_comes_first() -> None:
    made = machine(0, 1)
    made.note_load(1)
    learn(made, 2, 3)
    made.note_failure(3, "500", now=0)
    assert not made.is_trusted
    assert made.next(0) == Swap(1)
    made.note_load(1)
    assert made.next(0) == Swap(2)


def test_after_a_failed_load_what_arrived_meanwhile_comes_before_the_last_good_one() -> None:
    made = machine(0)
    made.note_load(0)
    learn(made, 1)
    made.note_failure(1, "500", now=0)
    learn(made, 2)
    assert made.next(0) == Swap(2)


def test_two_failed_loads_condemn_the_incarnation_alone() -> None:
    made = machine(0, 1)
    made.note_load(0)
    made.note_failure(1, "500", now=0)
    made.note_failure(0, "500", now=0)
    assert made.next(1000) == Condemn()
    assert made.see(EngineState("2", "default", False))
    assert made.next(1000) == Swap(1)


def test_a_fresh_reloader_loads_the_newest_once_whatever_the_label_says() -> None:
    made = machine(0, 1, label="policy@1")
    assert (made.served, made.is_trusted) == (1, True)
    assert made.next(0) == Swap(1)
    made.note_load(1)
    assert made.next(0) == Idle()


def test_a_fresh_reloader_never_goes_below_an_intact_label() -> None:
    made = machine(0, 1, 2, label="policy@1")
    made.unfit(2, "gone", now=0)
    assert made.next(0) == Swap(1)
    made.unfit(1, "gone", now=0)
    assert made.next(0) == Idle()
    assert made.is_trusted


@pytest.mark.parametrize(
    ("label", "paused"), [("policy@1", True), ("loading", False), ("other@1", False), ("policy@9", False)]
)
def test_a_fresh_reloader_does_not_believe_a_half_done_swap(label: str, paused: bool) -> None:
    made = machine(0, 1, label=label, paused=paused)
    assert (made.served, made.is_trusted) == (None, False)
    assert made.next(0) == Swap(1)


@pytest.mark.parametrize(("label", "paused"), [("policy@0", False), ("policy@1", True), ("loading", False)])
def test_an_engine_that_somebody_else_touched_is_loaded_again(label: str, paused: bool) -> None:
    made = machine(0, 1)
    made.note_load(1)
    assert not made.see(EngineState("1", "policy@1", False))
    assert made.next(0) == Idle()
    assert not made.see(EngineState("1", label, paused))
    assert not made.is_trusted
    assert made.next(0) == Swap(1)


def test_a_restarted_engine_starts_from_nothing() -> None:
    made = machine(0, 1)
    made.note_load(1)
    made.see(EngineState("2", "default", False))
    assert (made.served, made.is_trusted) == (None, False)
    assert made.next(0) == Swap(1)


FACTS = st.lists(
    st.one_of(
        st.tuples(st.just("learn"), st.integers(0, 8)),
        st.tuples(st.just("good"), st.just(0)),
        st.tuples(st.just("unfit"), st.just(0)),
        st.tuples(st.just("failed"), st.just(0)),
        st.tuples(st.just("restart"), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 90)),
    ),
    max_size=60,
)


@given(FACTS)
def test_versions_of_an_incarnation_never_fall_and_a_failure_is_followed_by_a_load(
    facts: list[tuple[str, int]],
) -> None:
    made = machine()
    now, incarnation, served, undefined = 0.0, 1, -1, 0
    for kind, value in facts:
        now += 0.01
        action = made.next(now)
        if kind == "learn":
            learn(made, value)
        elif kind == "wait":
            now += value
        elif kind == "restart":
            incarnation, served, undefined = incarnation + 1, -1, 0
            made.see(EngineState(str(incarnation), "default", False))
        elif isinstance(action, Swap):
            assert undefined < 2
            assert action.version >= served
            if kind == "good":
                made.note_load(action.version)
                served, undefined = action.version, 0
            elif kind == "unfit":
                made.unfit(action.version, "unfit", now)
            else:
                made.note_failure(action.version, "failed", now)
                undefined += 1
        assert made.is_condemned == (undefined >= 2)
        assert made.is_trusted == (undefined == 0 and served >= 0)
    while isinstance(action := made.next(now + 1000), Swap):
        made.note_load(action.version)
    assert made.is_condemned or made.newest is None or made.served == made.newest
