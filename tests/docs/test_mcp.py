"""docs/mcp.md, typed and wired from top to bottom before a real server: its commands, its configuration, its Python."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from millrace.infra.process.net import free_ports
from millrace.producers.client import AsyncSession
from tests.support.documents import MCP, ROOT, RUN_BY, blocks
from tests.support.gateway_world import World
from tests.support.mcp_captured import pairs, recorded, until

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "mcp.md"
STDIO, HTTP = [command for block in blocks(PAGE) if block.language == "sh" for command in block.commands]


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with `my_server.py`, where `millrace` and `python` are ours."""
    (tmp_path / "my_server.py").write_text((ROOT / "tests" / "support" / "mcp_server.py").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))


def block(language: str) -> str:
    (found,) = [block for block in blocks(PAGE) if block.language == language]
    return found.text


async def captured(w: World, name: str = "add") -> None:
    await until(lambda: [result for _, result in pairs(w.events()) if result])
    ((call, result),) = pairs(w.events())
    assert (call["name"], call["server"]) == (name, "calc")
    assert result is not None
    assert json.loads(result["content"])["structuredContent"] == {"result": 7.0}


def test_the_command_serves_where_the_servers_stood(tmp_path: Path) -> None:
    assert RUN_BY[STDIO] == RUN_BY[HTTP] == MCP
    asked = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    words = shlex.split(STDIO)
    plain, ours = (
        subprocess.run(command, input=json.dumps(asked) + "\n", capture_output=True, text=True, timeout=240)
        for command in (words[words.index("--") + 1 :], words)
    )
    assert json.loads(ours.stdout) == json.loads(plain.stdout)
    assert (ours.returncode, plain.returncode) == (0, 0)


async def test_a_file_of_servers_captures(tmp_path: Path) -> None:
    (wired,) = json.loads(block("text"))["mcpServers"].values()
    assert set(wired["env"]) == {"MILLRACE_SESSION_KEY", "MILLRACE_GATEWAY_URL"}
    async with recorded(tmp_path / "gateway") as w:
        session = await w.start()
        env = {"MILLRACE_SESSION_KEY": session["api_key"], "MILLRACE_GATEWAY_URL": f"{w.url}/v1"}
        async with Client(StdioServerParameters(command=wired["command"], args=wired["args"], env=env)) as client:
            await client.call_tool("add", {"a": 3, "b": 4})
        await captured(w)


async def test_the_python_captures(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(block("python"), names)
    async with recorded(tmp_path / "gateway") as w, await AsyncSession.start(f"{w.url}/v1") as session:
        assert await names["use_tools"](session, {"a": 3, "b": 4}) == "7.0"
        await captured(w)


async def test_the_proxy_captures(tmp_path: Path) -> None:
    server, ours = free_ports(2)
    words = shlex.split(HTTP.replace("9000", str(server)).replace("9100", str(ours)))
    async with AsyncExitStack() as stack:
        w = await stack.enter_async_context(recorded(tmp_path / "gateway"))
        session = await w.start()
        for command in (
            ["python", "my_server.py", str(server)],
            [*words, "--gateway", f"{w.url}/v1", "--server", "calc"],
        ):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        for port in (server, ours):
            async with asyncio.timeout(120):
                while True:
                    try:
                        _, writer = await asyncio.open_connection("127.0.0.1", port)
                    except OSError:
                        await asyncio.sleep(0.05)
                        continue
                    writer.close()
                    break
        async with Client(f"http://127.0.0.1:{ours}/{session['api_key']}/mcp") as client:
            await client.call_tool("add", {"a": 3, "b": 4})
        await captured(w)
