"""Kill -9 of the proxy behind any answer, and a gateway that comes and goes: what a client saw answered is in the
episode, once."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from millrace.infra.process.net import free_ports
from tests.producers.intake.test_stdio import echo_server, through
from tests.support.mcp_captured import pairs, recorded, until

pytestmark = pytest.mark.slow

ROUNDS = 4


def asked_until_killed(process: Any, ids: list[int], kill_after: int) -> list[int]:
    """Ask, many at once, and kill us behind an answer. Returns what the client saw answered, whole lines only."""
    seen: list[int] = []
    wire = b"".join(
        json.dumps({"id": id, "method": "tools/call", "params": {"name": "f", "arguments": {"id": id}}}).encode()
        + b"\n"
        for id in ids
    )
    process.stdin.write(wire)
    process.stdin.flush()
    while len(seen) < kill_after and (line := process.stdout.readline()).endswith(b"\n"):
        seen.append(json.loads(line)["id"])
    process.kill()
    seen += [json.loads(line)["id"] for line in process.stdout if line.endswith(b"\n")]
    process.wait()
    return seen


@pytest.mark.parametrize("seed", range(2))
async def test_what_a_client_saw_answered_is_in_the_episode_once(tmp_path: Path, seed: int) -> None:
    r, (port,) = random.Random(seed), free_ports(1)
    url = f"http://127.0.0.1:{port}/v1"
    seen: list[int] = []
    asked = 0
    async with recorded(tmp_path / "gateway", port) as w:
        session = await w.start()
    for _ in range(ROUNDS):
        async with AsyncExitStack() as stack:
            if r.random() < 0.6:
                await stack.enter_async_context(recorded(tmp_path / "gateway", port))
            process = through(tmp_path, *echo_server(), session=session, url=url)
            count = r.randrange(1, 200)
            ids = list(range(asked, asked := asked + count))
            seen += await asyncio.to_thread(asked_until_killed, process, ids, r.randrange(count + 1))
            process.stderr.close()
    async with recorded(tmp_path / "gateway", port) as w:
        process = through(tmp_path, *echo_server(), session=session, url=url)
        spools = tmp_path / "spool" / "millrace" / "intake"
        await until(lambda: len([spool for spool in spools.iterdir() if spool.is_dir()]) <= 1 and len(w.events()) > 1)
        await asyncio.to_thread(process.communicate, timeout=120)
        found = [json.loads(call["arguments"])["id"] for call, result in pairs(w.events()) if result]
        assert len(set(found)) == len(found)
        assert set(seen) <= set(found)
        for call, result in pairs(w.events()):
            assert result is None or json.loads(result["content"])["content"] == [json.loads(call["arguments"])["id"]]
