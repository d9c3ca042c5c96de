"""The user's agent: `module:function`, sync or async.

    def agent(task: dict, base_url: str, api_key: str) -> str | None

Invariant: the agent never sees the task's `answer`; that is for the judges."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from infra.errors import ConfigError

HIDDEN = ("answer", "answers", "solution")
Agent = Callable[[dict[str, Any], str, str], Awaitable[str | None]]


def load_agent(name: str, threads: int) -> Agent:
    """The agent as an async function; a sync one runs in a pool of `threads`. Raises ConfigError when there is none."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"[rollout] agent {name!r} must be module:function, such as my_agents.sort:agent")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"[rollout] agent {name!r} cannot be loaded: {error}") from error
    if not callable(function):
        raise ConfigError(f"[rollout] agent {name!r} is not a function")
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
