"""docs/a2a.md: its command, typed before a real agent."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from a2a.client import ClientConfig, create_client
from a2a.helpers import proto_helpers as made
from a2a.types.a2a_pb2 import Role, SendMessageRequest

from millrace.infra.process.net import free_ports
from tests.support.documents import A2A, ROOT, RUN_BY, blocks
from tests.support.mcp_captured import pairs, recorded, until

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "a2a.md"
((COMMAND,),) = [block.commands for block in blocks(PAGE) if block.language == "sh"]


async def test_work_that_is_handed_on_is_an_episode_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RUN_BY[COMMAND] == A2A
    monkeypatch.setenv("PATH", f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    far, ours = free_ports(2)
    words = shlex.split(COMMAND.replace("9300", str(far)).replace("9400", str(ours)))
    async with AsyncExitStack() as stack:
        w = await stack.enter_async_context(recorded(tmp_path / "gateway"))
        session = await w.start()
        key = str(w.gateway.options.rollout_key)
        told = {**os.environ, "MILLRACE_GATEWAY_URL": f"{w.url}/v1", "MILLRACE_GATEWAY_KEY": key}
        for command in ([sys.executable, "-m", "tests.support.a2a_agent", str(far)], words):
            process = subprocess.Popen(command, cwd=ROOT, env=told, stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
        for port in (far, ours):
            async with asyncio.timeout(120):
                while True:
                    try:
                        await http.get(f"http://127.0.0.1:{port}/seen")
                        break
                    except httpx.ConnectError:
                        await asyncio.sleep(0.05)
        url = f"http://127.0.0.1:{ours}/{session['api_key']}"
        async with await create_client(url, ClientConfig(httpx_client=http)) as client:
            said = SendMessageRequest(message=made.new_text_message("work", role=Role.ROLE_USER))
            async for _ in client.send_message(said):
                pass
        await until(lambda: [1 for event in w.events() if event["kind"] == "episode_ended"])
        ((call, result),) = pairs(w.events(session["session"]))
        assert result is not None
        assert result["status"] == "ok"
        (child,) = {e["trajectory"] for e in w.events() if e["parent_trajectory"] == session["session"]}
        assert {event["spawn_call"] for event in w.events(child)} == {call["call_id"]}
