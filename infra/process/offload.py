"""Work whose time grows with a request: beside the event loop, or a piece at a time.

Invariants: what may take more than a few milliseconds of a request's own CPU runs in a thread, where the interpreter
hands its lock on after each switch interval, so that one call does not delay another; the threads are few and do
nothing else, so that what waits for them is only ever heavy itself."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

HEAVY = 16 << 10
"""bytes from which on a body is read and tokenized beside the event loop; less takes a few milliseconds at most"""
SLICE = 256
"""tokens, and rivals of tokens, that are handled at one go on the event loop"""
THREADS = 2

P = ParamSpec("P")
R = TypeVar("R")

_threads = ThreadPoolExecutor(THREADS, "aside")


async def run_aside(size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`work(*args)`, in a thread where `size` (bytes that it reads or writes) is large."""
    if size < HEAVY:
        return work(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(work, *args, **kwargs))


Step = Callable[[], None] | None
"""What comes between two parts of some work: something to do beside the event loop first, or nothing. The part behind
it must do without, where it was left out."""


class TurnQueue:
    """Lets its callers go on in their order, one in each turn of the event loop, so that work which many have to do at
    the same moment delays everything else by one piece of it."""

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._is_busy = False
        """`_pass_on` is about to be called"""

    async def turn(self) -> None:
        """Wait until every earlier caller has had its turn."""
        loop = asyncio.get_running_loop()
        if self._is_busy:
            waiter = loop.create_future()
            self._waiters.append(waiter)
            await waiter
        else:
            self._is_busy = True
            loop.call_soon(self._pass_on, loop)

    def _pass_on(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():  # it is done where its task was cancelled
                waiter.set_result(None)
                loop.call_soon(self._pass_on, loop)
                return
        self._is_busy = False


async def by_turns(steps: Iterator[Step], queue: TurnQueue | None = None) -> None:
    """All steps, once the queue lets them begin, and between which others have their turn. Cancelling it leaves none
    undone."""
    try:
        if queue is not None:
            await queue.turn()
        for work in steps:
            if work is None:
                await asyncio.sleep(0)
            else:
                await asyncio.get_running_loop().run_in_executor(_threads, work)
    finally:
        for _ in steps:
            pass
