"""The mark of a partition against its definition, over any order of deliveries and answers with holes between."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.streams.reward.progress import Answered

offsets = st.lists(st.integers(0, 1_000), unique=True, min_size=1).map(sorted)


@given(offsets, st.data())
def test_the_mark_passes_holes_and_never_an_unanswered_event(log, data):
    answered: Answered[str] = Answered()
    given_out: list[int] = []
    done: set[int] = set()
    for offset in log:
        answered.deliver("p", offset)
        given_out.append(offset)
        for ready in data.draw(st.sets(st.sampled_from(given_out))) - done:
            answered.answer("p", ready)
            done.add(ready)
        waiting = [offset for offset in given_out if offset not in done]
        assert answered.mark("p") == (min(waiting) if waiting else given_out[-1] + 1)
    for offset in log:
        answered.answer("p", offset)
    assert answered.mark("p") == log[-1] + 1


def test_partitions_know_nothing_of_each_other_and_a_lost_one_is_forgotten():
    answered: Answered[int] = Answered()
    answered.deliver(0, 5)
    answered.deliver(1, 9)
    answered.answer(1, 9)
    assert (answered.mark(0), answered.mark(1), answered.mark(2)) == (5, 10, None)
    answered.forget([0, 2])
    answered.answer(0, 5)  # a late answer to what another reader has now
    assert answered.mark(0) is None


def test_what_is_delivered_again_waits_again():
    answered: Answered[int] = Answered()
    for offset in (3, 4):
        answered.deliver(0, offset)
        answered.answer(0, offset)
    answered.deliver(0, 3)
    assert answered.mark(0) == 3
