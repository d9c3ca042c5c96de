"""The user's agent: `module:function`, sync or async.

    def agent(task: dict, base_url: str, api_key: str) -> str | None

Invariant: the agent never sees the task's `answer` and `tests`; they are for the judges."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from millrace.infra.process.loaders import load_function

HIDDEN = ("answer", "answers", "solution", "tests")
Agent = Callable[[dict[str, Any], str, str], Awaitable[str | None]]


def load_agent(name: str, threads: int) -> Agent:
    """The agent as an async function; a sync one runs in a pool of `threads`. Raises ConfigError when there is none."""
    function = load_function(name, "[rollout] agent", "my_agents.sort:agent")
    if inspect.iscoroutinefunction(function):
        return _shown(function)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="agent")

    async def run(task: dict[str, Any], base_url: str, api_key: str) -> str | None:
        return await asyncio.get_running_loop().run_in_executor(pool, function, task, base_url, api_key)

    return _shown(run)


def _shown(function: Agent) -> Agent:
    async def run(task: dict[str, Any], base_url: str, api_key: str) -> str | None:
        shown = {name: value for name, value in task.items() if name not in HIDDEN}
        output = await function(shown, base_url, api_key)
        return None if output is None else str(output)

    return run
