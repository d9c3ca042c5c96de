"""Whom a request goes to: one conversation has one process, wherever its calls arrive and whatever they show of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from millrace.producers.gateway.marks import index_of, marked_id, minted_call
from millrace.producers.gateway.processes.owner import Evidence, ProcessLayout, ProcessWay, choose_process, ways

MOST = 5
numbers = st.integers(1, MOST)


@st.composite
def evidences(draw: Any) -> Evidence:
    ids = st.integers(0, MOST + 1).map(marked_id) | st.text(max_size=5)
    return Evidence(
        exact=draw(st.none() | ids),
        name=draw(st.none() | ids),
        attempt=draw(st.none() | st.text(max_size=3)),
        call_ids=tuple(draw(st.lists(st.integers(0, MOST).map(minted_call), max_size=3))),
        head=draw(st.none() | st.binary(max_size=2)),
    )


@given(evidences(), numbers, st.lists(numbers, max_size=3), st.data())
def test_the_ways_end_and_do_not_depend_on_where_a_request_arrived(
    said: Evidence, processes: int, former: list[int], data: st.DataObject
) -> None:
    here = data.draw(st.integers(0, processes - 1))
    layout = ProcessLayout(here, processes, tuple(former))
    route = ways(said, layout)
    assert not route[-1].must_exist
    assert all(way.must_exist for way in route[:-1])
    assert all(way.process in layout.holders for way in route)
    assert all(one.process != next.process for one, next in itertools.pairwise(route))
    assert route[-1].process < processes, "who is retired begins nothing"
    known = said.exact is None or index_of(said.exact) in range(processes)
    if known and said != Evidence(call_ids=said.call_ids):
        other = data.draw(st.integers(0, processes - 1))
        assert ways(said, ProcessLayout(other, processes, tuple(former))) == route


@given(st.text(), numbers)
def test_of_one_process_more_a_key_moves_only_to_the_new_one(key: str, processes: int) -> None:
    assert choose_process(key, processes + 1) in (choose_process(key, processes), processes)


def test_names_are_spread() -> None:
    counts = [[choose_process(f"name {at}", 3) for at in range(3000)].count(index) for index in range(3)]
    assert all(900 < count < 1100 for count in counts)


def test_a_former_number_of_processes_is_asked_before_the_present_one_begins_anything() -> None:
    name = next(f"n{at}" for at in range(100) if choose_process(f"name n{at}", 2) == 1)
    assert ways(Evidence(name=name), ProcessLayout(1, 2, (1,))) == [
        ProcessWay(0, must_exist=True),
        ProcessWay(1, must_exist=False),
    ]
    assert ways(Evidence(name=name), ProcessLayout(1, 2)) == [ProcessWay(1, must_exist=False)]


def test_ids_that_a_conversation_was_told_are_asked_for_where_they_were_minted() -> None:
    head = next(str(at).encode() for at in range(100) if choose_process(f"head {str(at).encode().hex()}", 3) == 0)
    here, there = minted_call(1), minted_call(2)
    layout = ProcessLayout(0, 3)
    final = ProcessWay(0, must_exist=False)
    assert ways(Evidence(call_ids=(here,), head=head), layout) == [ProcessWay(1, must_exist=True), final]
    assert ways(Evidence(call_ids=(minted_call(0), minted_call(0)), head=head), layout) == [final]
    assert ways(Evidence(call_ids=(here, there), head=head), layout) == [final], "ids of two say nothing"
    assert ways(Evidence(call_ids=(minted_call(9),), head=head), layout) == [final], "of another gateway"
    assert ways(Evidence(head=head), layout) == [final]


@dataclass
class Conversation:
    """What a client knows of its conversation, and where its live session is."""

    name: str | None
    head: bytes
    told: list[str] = field(default_factory=list)
    responses: list[str] = field(default_factory=list)
    place: int | None = None


@dataclass
class Machine:
    """All processes of a gateway, as far as it matters who holds what: answers as the rules of one process have it."""

    processes: int
    former: tuple[int, ...] = ()
    conversations: list[Conversation] = field(default_factory=list)

    def holder(self, index: int, said: Evidence) -> Conversation | None:
        """The live conversation of a process that a call goes on in."""
        here = [one for one in self.conversations if one.place == index]
        if said.name is not None:
            return next((one for one in here if one.name == said.name), None)
        if said.exact is not None:
            return next((one for one in here if said.exact in one.responses), None)
        told = [one for one in here if one.name is None and set(one.told) & set(said.call_ids)]
        if len(told) == 1:
            return told[0]
        return next((one for one in here if one.name is None and one.head == said.head), None)

    def call(self, at: int, said: Evidence, mine: Conversation) -> None:
        """A call of this conversation arrives at a process."""
        for way in ways(said, ProcessLayout(at % self.processes, self.processes, self.former)):
            found = self.holder(way.process, said)
            if way.must_exist and found is None:
                continue
            assert found in (None, mine), "another's session"
            assert found is mine or mine.place is None, "a second session of one conversation"
            mine.place = way.process
            mine.told.append(minted_call(way.process))
            mine.responses.append(f"resp_{marked_id(way.process)}")
            return
        raise AssertionError("nobody answered")


shown = st.sampled_from(["all", "head", "trimmed", "exact"])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.integers(0, 3), st.integers(0, MOST), shown),
        st.tuples(st.just("end"), st.integers(0, 3)),
        st.tuples(st.just("processes"), numbers),
    ),
    max_size=40,
)


@given(numbers, steps)
def test_a_conversation_has_one_session_whatever_its_calls_show_and_however_many_processes_there_are(
    processes: int, asked: list[tuple[Any, ...]]
) -> None:
    machine = Machine(processes)
    kinds = [("a", b"1"), ("b", b"1"), (None, b"1"), (None, b"2")]
    machine.conversations = [Conversation(name, head) for name, head in kinds]
    for what, *more in asked:
        if what == "processes":
            if more[0] != machine.processes:
                former = (machine.processes, *machine.former)
                machine.former = tuple(dict.fromkeys(count for count in former if count != more[0]))
                machine.processes = more[0]
        elif what == "end":
            machine.conversations[more[0]].place = None
        else:
            which, at, show = more
            mine = machine.conversations[which]
            if mine.name is not None:
                said = Evidence(name=mine.name)
            elif show == "exact" and mine.place is not None:
                said = Evidence(exact=mine.responses[-1])
            elif show == "trimmed" and mine.place is not None:
                said = Evidence(call_ids=(mine.told[-1],), head=b"what a framework made of it")
            else:
                said = Evidence(call_ids=tuple(mine.told) if show == "all" else (), head=mine.head)
            machine.call(at, said, mine)
