"""The user's agent: `module:function`, sync or async.

    def agent(task: dict, base_url: str, api_key: str) -> str | None

Invariants: the agent never sees the task's `answer` and `tests`, which are for the judges; it runs in threads of its
own, so whatever it does (blocks, hangs, leaves its thread by `sys.exit`) the worker's loop goes on, and whoever waits
for a call with a deadline gets it. A synchronous call has a thread to itself. Asynchronous calls share one loop in one
thread, so that they may share clients; one that still blocks that loop past its deadline leaves it to the calls that
are on it, and later calls get another.

The price: a thread cannot be ended, so a call that never returns keeps its own. `Trouble.stuck` counts them, and the
worker starts anew before there are too many."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import uvloop

from millrace.infra.process.loaders import load_function
from millrace.producers.rollout.trouble import Trouble
from millrace.schemas.json_values import JsonObject

logger = logging.getLogger(__name__)

JUDGE_FIELDS = ("answer", "answers", "solution", "tests")
ANSWER_S = 1.0
"""a loop that runs nothing for so long after a deadline is blocked"""
Agent = Callable[[JsonObject, str, str], Awaitable[str | None]]


def load_agent(name: str, trouble: Trouble | None = None) -> Agent:
    """The agent as a function to await in any loop. `trouble` learns of the calls that do not return. Raises
    ConfigError when there is none."""
    function = load_function(name, "[rollout] agent", "my_agents.sort:agent")
    stuck_calls = (trouble or Trouble()).stuck
    return (
        AsyncAgent(function, stuck_calls)
        if inspect.iscoroutinefunction(function)
        else sync_agent(function, stuck_calls)
    )


def sync_agent(function: Callable[..., Any], stuck_calls: set[Future[None]]) -> Agent:
    """`function`, each call in a thread of its own. `stuck_calls` has the calls that were given up and still run."""

    async def agent(task: JsonObject, base_url: str, api_key: str) -> str | None:
        call: Future[str | None] = Future()
        end: Future[None] = Future()

        def work() -> None:
            try:
                call.set_result(_text(function(_public_task(task), base_url, api_key)))
            except BaseException as error:
                call.set_exception(_as_exception(error))
            end.set_result(None)

        call.set_running_or_notify_cancel()
        threading.Thread(target=work, name="agent", daemon=True).start()
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            _note(stuck_calls, end)
            raise

    return agent


class AsyncAgent:
    """The coroutine function `function`, its calls in one loop in a thread of its own."""

    def __init__(self, function: Callable[..., Awaitable[Any]], stuck_calls: set[Future[None]]) -> None:
        self._function = function
        self._stuck_calls = stuck_calls
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, task: JsonObject, base_url: str, api_key: str) -> str | None:
        loop = self._loop = self._loop or _running_loop()
        call = asyncio.run_coroutine_threadsafe(self._call(_public_task(task), base_url, api_key), loop)
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            answer = asyncio.run_coroutine_threadsafe(_probe(), loop)
            asyncio.get_running_loop().call_later(ANSWER_S, self._leave, loop, answer)
            raise

    async def _call(self, task: JsonObject, base_url: str, api_key: str) -> str | None:
        try:
            return _text(await self._function(task, base_url, api_key))
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise  # by its deadline
            raise _as_exception(error) from error
        except BaseException as error:
            raise _as_exception(error) from error

    def _leave(self, loop: asyncio.AbstractEventLoop, answer: Future[None]) -> None:
        """No later call goes to a loop that did not answer."""
        if self._loop is loop and not answer.done():
            self._loop = None
            _note(self._stuck_calls, answer)


def _running_loop() -> asyncio.AbstractEventLoop:
    loop = uvloop.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agents", daemon=True).start()
    return loop


def _note(stuck_calls: set[Future[None]], end: Future[None]) -> None:
    """A call was given up: it is stuck until `end`."""
    stuck_calls.add(end)
    end.add_done_callback(stuck_calls.discard)
    if not end.done():
        logger.warning(
            "an agent did not return by its deadline and keeps a thread; %d such threads now: give what it waits for "
            "a timeout below [rollout] timeout_s",
            len(stuck_calls),
        )


async def _probe() -> None:
    """To be run by a loop that is not blocked."""


def _public_task(task: JsonObject) -> JsonObject:
    return {name: value for name, value in task.items() if name not in JUDGE_FIELDS}


def _text(output: object) -> str | None:
    return None if output is None else str(output)


def _as_exception(error: BaseException) -> Exception:
    """An error that a future takes, and that ends no loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
