"""What many have to do at once is done by turns of the event loop, and whoever is cancelled stops nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.process.offload import Step, TurnQueue, by_turns


@given(st.lists(st.booleans(), max_size=12))
def test_one_goes_on_in_each_turn_of_the_loop(cancelled: list[bool]) -> None:
    asyncio.run(_check_order(cancelled))


async def _check_order(cancelled: list[bool]) -> None:
    queue, turn, taken = TurnQueue(), 0, list[tuple[int, int]]()

    async def caller(number: int) -> None:
        await queue.turn()
        taken.append((number, turn))

    tasks = [asyncio.create_task(caller(number)) for number in range(len(cancelled))]
    await asyncio.sleep(0)
    for task, is_cancelled in zip(tasks, cancelled, strict=True):
        if is_cancelled:
            task.cancel()
    for turn in range(1, 3 * len(tasks) + 3):  # noqa: B007 (the callers read it)
        await asyncio.sleep(0)
    numbers = [number for number, _ in taken]
    assert numbers == [number for number, was in enumerate(cancelled) if not was or number == 0]
    assert len({at for _, at in taken}) == len(taken)
    await queue.turn()  # nobody is left before this caller


async def test_steps_that_wait_for_their_turn_are_done_when_they_are_cancelled() -> None:
    queue, steps = TurnQueue(), list[int]()

    def work() -> Iterator[Step]:
        for number in range(3):
            steps.append(number)
            yield None

    earlier = [asyncio.create_task(queue.turn()) for _ in range(2)]
    task = asyncio.create_task(by_turns(work(), queue))
    await asyncio.sleep(0)
    assert not steps
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == [0, 1, 2]
    await asyncio.gather(*earlier)
