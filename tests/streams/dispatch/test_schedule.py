"""Batches tile the sequence, whatever B was asked for and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.streams.dispatch.schedule import BatchSchedule


def test_with_one_size_ends_are_multiples():
    schedule = BatchSchedule(3, 12, [[0, 4]])
    assert [schedule.end(k) for k in (2, 3, 4, 7)] == [12, 16, 20, 32]
    assert [schedule.batch_of(seq) for seq in (12, 15, 16, 31)] == [3, 3, 4, 7]


def test_a_change_begins_where_a_batch_does():
    first, sizes = BatchSchedule(0, 0, [[0, 4]]).with_size(1, 3)
    assert (first, sizes) == (8, [[0, 4], [8, 3]])
    schedule = BatchSchedule(0, 0, sizes)
    assert [schedule.end(k) for k in range(4)] == [4, 8, 11, 14]


def test_a_later_change_never_comes_before_an_earlier_one():
    first, sizes = BatchSchedule(0, 0, [[0, 4], [40, 3]]).with_size(1, 5)
    assert (first, sizes) == (40, [[0, 4], [40, 5]])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=6), st.integers(0, 60))
def test_every_seq_lies_in_the_batch_that_holds_it(changes, seq):
    schedule = BatchSchedule(0, 0, [[0, 2]])
    for after, size in changes:
        schedule = BatchSchedule(0, 0, schedule.with_size(after, size)[1])
    batch = schedule.batch_of(seq)
    assert schedule.end(batch - 1) <= seq < schedule.end(batch)
