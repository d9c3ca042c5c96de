"""Pipeline schedules, played with queues between ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.trainers.backends.parallel.schedules import (
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    SCHEDULES,
    Action,
    actions,
    chunks_of,
    forwards,
)
from millrace.trainers.errors import BadConfiguration


def play(orders: list[list[Action]], chunks: int) -> list[int]:
    """Runs all ranks until nobody can go on; the largest number of micro-batches that each had in flight."""
    ranks = len(orders)
    last = ranks * chunks - 1
    done: set[tuple[bool, int, int]] = set()
    at, flying, most = [0] * ranks, [0] * ranks, [0] * ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                backward, chunk, micro = order[at[rank]]
                stage = chunk * ranks + rank
                if not backward:
                    needs = {(False, stage - 1, micro)} if stage else set()
                else:
                    needs = {(False, stage, micro)} | ({(True, stage + 1, micro)} if stage < last else set())
                if not needs <= done:
                    break
                assert (backward, stage, micro) not in done
                done.add((backward, stage, micro))
                flying[rank] += -1 if backward else 1
                most[rank] = max(most[rank], flying[rank])
                at[rank] += 1
                moved = True
    assert at == [len(order) for order in orders], "blocked"
    return most


@given(st.sampled_from(SCHEDULES), st.integers(1, 5), st.integers(1, 9))
def test_every_pass_is_made_once_and_nobody_blocks(schedule: str, ranks: int, micros: int) -> None:
    chunks = chunks_of(schedule)
    if schedule == INTERLEAVED:
        micros *= ranks
    orders = [actions(schedule, ranks, rank, micros) for rank in range(ranks)]
    for order in orders:
        assert len(order) == len(set(order)) == 2 * chunks * micros
        for chunk in range(chunks):
            for way in (False, True):
                assert [a.micro for a in order if (a.chunk, a.backward) == (chunk, way)] == list(range(micros))
    most = play(orders, chunks)
    if schedule == ONE_F_ONE_B:
        assert most == [min(micros, ranks - rank) for rank in range(ranks)], "memory does not grow with micro-batches"
    if schedule == GPIPE:
        assert most == [micros] * ranks


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_passing_forward_alone_does_not_block(ranks: int, chunks: int, micros: int) -> None:
    play([forwards(chunks, micros) for _ in range(ranks)], chunks)


def test_what_makes_no_schedule_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="choose gpipe, 1f1b, interleaved"):
        chunks_of("zigzag")
    with pytest.raises(BadConfiguration, match="3 micro-batches do not interleave on 2 ranks"):
        actions(INTERLEAVED, 2, 0, 3)
