"""What the tests of intake share: a gateway with a session, the command before a server, and what was captured."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.gateway_world import World, world

ROOT = Path(__file__).parents[2]
SERVER = [sys.executable, "-m", "tests.support.mcp_server"]
MILLRACE = [sys.executable, "-m", "millrace.apps.cli.main"]
PATIENCE_S = 120.0


def environment(spool: Path, session: dict[str, str] | None = None, url: str = "") -> dict[str, str]:
    """Of a process that captures into a session."""
    named = {} if session is None else {"MILLRACE_SESSION_KEY": session["api_key"], "MILLRACE_GATEWAY_URL": url}
    return {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(spool), **named}


@asynccontextmanager
async def recorded(folder: Path, port: int | None = None) -> AsyncIterator[World]:
    """A gateway that only keeps sessions."""
    async with world(folder, None, None, port=port) as w:
        yield w


def pairs(events: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Every tool call with its result. Each result must belong to one call, each call have one at most."""
    calls = [event["data"] for event in events if event["kind"] == "tool_call"]
    results = {event["data"]["call_id"]: event["data"] for event in events if event["kind"] == "tool_result"}
    assert len({call["call_id"] for call in calls}) == len(calls)
    assert len(results) == sum(event["kind"] == "tool_result" for event in events)
    assert set(results) <= {call["call_id"] for call in calls}
    return [(call, results.get(call["call_id"])) for call in calls]


async def until(there: Callable[[], Any], what: str = "it") -> Any:
    """Wait for something to be so."""
    async with asyncio.timeout(PATIENCE_S):
        while not (found := there()):
            await asyncio.sleep(0.02)
    assert found, what
    return found
