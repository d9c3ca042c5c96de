"""Work whose time grows with a request: beside the event loop, or a piece at a time.

Invariants: what may take more than a few milliseconds of a request's own CPU runs in a thread, where the interpreter
hands its lock on after each switch interval, so that one call does not delay another; the threads are few and do
nothing else, so that what waits for them is only ever heavy itself."""

from __future__ import annotations

import asyncio
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


async def aside(size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`work(*args)`, in a thread where `size` (bytes that it reads or writes) is large."""
    if size < HEAVY:
        return work(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(work, *args, **kwargs))


Step = Callable[[], None] | None
"""What comes between two parts of some work: something to do beside the event loop first, or nothing. The part behind
it must do without, where it was left out."""


async def by_turns(steps: Iterator[Step]) -> None:
    """All steps, between which others have their turn. Cancelling it leaves none undone."""
    try:
        for work in steps:
            if work is None:
                await asyncio.sleep(0)
            else:
                await asyncio.get_running_loop().run_in_executor(_threads, work)
    finally:
        for _ in steps:
            pass
