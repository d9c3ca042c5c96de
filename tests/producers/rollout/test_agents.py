"""Whatever one agent does, whoever awaits it goes on, gets its deadline, and others are served."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.producers.rollout import agents
from millrace.producers.rollout.agents import AsyncAgent, sync_agent
from millrace.producers.rollout.trouble import Trouble

DEADLINE_S, HEALTHY_S = 0.3, 120.0
RELEASE = threading.Event()
"""set when a test is over: what hangs may go"""


class Stubborn(BaseException):
    """Nothing that `except Exception` takes."""


def act(how: str) -> str:
    match how:
        case "block":
            RELEASE.wait(600)
        case "fail":
            raise ValueError("no idea")
        case "exit":
            sys.exit(3)
        case "stop":
            raise StopIteration
        case "stubborn":
            raise Stubborn
        case "cancelled":
            raise asyncio.CancelledError
    return "done"


def sync(task: dict[str, Any], base_url: str, api_key: str) -> str:
    return act(task["how"])


async def asynchronous(task: dict[str, Any], base_url: str, api_key: str) -> str:
    match task["how"]:
        case "wait":
            await asyncio.sleep(600)
        case "ignore":
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    continue
    return act(task["how"])


SYNC = ("block", "fail", "exit", "stop", "stubborn", "cancelled", "answer")
ASYNC = (*SYNC, "wait", "ignore")
HANGS = ("block", "wait", "ignore")


@pytest.fixture(autouse=True)
def release(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(agents, "ANSWER_S", 0.1)
    RELEASE.clear()
    yield
    RELEASE.set()


async def call(agent: Any, how: str, deadline_s: float) -> str | None:
    """The output, or the name of the error."""
    try:
        async with asyncio.timeout(deadline_s):
            return await agent({"how": how}, "", "")
    except Exception as error:
        return type(error).__name__


async def ticking(stop: asyncio.Event) -> int:
    """How often the caller's loop came round while it was free."""
    count = 0
    while not stop.is_set():
        count += 1
        await asyncio.sleep(0.001)
    return count


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from(ASYNC)), min_size=1, max_size=12).map(
        lambda calls: [(sync, how) for sync, how in calls if how in SYNC or not sync]
    )
)
def test_whatever_agents_do_deadlines_hold_and_later_calls_are_served(calls: list[tuple[bool, str]]) -> None:
    async def run() -> None:
        trouble, stop = Trouble(), asyncio.Event()
        both = {True: sync_agent(sync, trouble.stuck), False: AsyncAgent(asynchronous, trouble.stuck)}
        ticks = asyncio.create_task(ticking(stop))
        outcomes = await asyncio.gather(
            *(call(both[kind], how, DEADLINE_S if how in HANGS else HEALTHY_S) for kind, how in calls if kind)
        )
        for (_, how), outcome in zip([c for c in calls if c[0]], outcomes, strict=True):
            assert outcome == {"answer": "done", "block": "TimeoutError", "fail": "ValueError"}.get(how, "RuntimeError")
        outcomes = await asyncio.gather(*(call(both[False], how, DEADLINE_S) for kind, how in calls if not kind))
        for (_, how), outcome in zip([c for c in calls if not c[0]], outcomes, strict=True):
            assert outcome == "TimeoutError" or how not in HANGS
        stop.set()
        assert await ticks > 1 or not any(how in HANGS for _, how in calls)
        # Later calls are served, once a blocked loop was left.
        while await call(both[False], "answer", 1.0) != "done":
            continue
        assert await call(both[True], "answer", HEALTHY_S) == "done"

    asyncio.run(asyncio.wait_for(run(), 240))


async def test_stuck_calls_are_counted_until_they_return(caplog: pytest.LogCaptureFixture) -> None:
    trouble = Trouble(stuck_limit=3)
    agent = sync_agent(sync, trouble.stuck)
    assert await asyncio.gather(*(call(agent, "block", 0.1) for _ in range(3))) == ["TimeoutError"] * 3
    assert (len(trouble.stuck), trouble.is_worn) == (3, True)
    assert "3 such threads" in caplog.text
    RELEASE.set()
    while trouble.stuck:
        await asyncio.sleep(0.01)
    assert not trouble.is_worn


async def test_calls_share_a_loop_until_one_blocks_it_past_its_deadline() -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def agent(task: dict[str, Any], base_url: str, api_key: str) -> str:
        loops.append(asyncio.get_running_loop())
        return act(task["how"])

    trouble = Trouble()
    calls = AsyncAgent(agent, trouble.stuck)
    for _ in range(3):
        assert await call(calls, "answer", HEALTHY_S) == "done"
    assert len(set(loops)) == 1
    assert await call(calls, "block", 0.1) == "TimeoutError"
    while not trouble.stuck:
        await asyncio.sleep(0.01)
    assert await call(calls, "answer", HEALTHY_S) == "done"
    assert len(set(loops)) == 2
