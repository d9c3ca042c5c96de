"""A gateway that is told to stop: calls under way are answered and recorded, new ones are sent elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.process.net import free_ports
from millrace.producers.capture.log import CaptureLog
from millrace.producers.gateway.calls.fleet import Fleet
from millrace.producers.gateway.calls.gateway import Gateway
from millrace.producers.gateway.options import GatewayOptions
from millrace.producers.gateway.serve import serve
from millrace.producers.gateway.sessions.recorder import Recorder
from millrace.producers.gateway.sessions.sessions import Sessions
from tests.support.gateway_world import ENGINE, ScriptedEngine

WAIT_S = 60.0


async def until(done: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not done():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_under_way_are_answered_and_recorded(tmp_path: Path, renderer: TemplateRenderer, stream: bool):
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode("The answer is 42.<|im_end|>"))
    engine.gate = asyncio.Semaphore(0)
    log = CaptureLog(tmp_path / "capture")
    fleet = Fleet("policy", lambda url: engine, (ENGINE,))
    gateway = Gateway(GatewayOptions("policy"), Sessions(log.folder, "policy"), Recorder(log), fleet, renderer)
    stop, (port,) = asyncio.Event(), free_ports(1)
    serving = asyncio.create_task(serve(gateway, "127.0.0.1", port, stop))
    url, body = "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as http:
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    await http.get("/health")
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.01)
        calling = asyncio.create_task(http.post(url, json={**body, "stream": stream}))
        await until(lambda: engine.asked)
        stop.set()
        await until(lambda: gateway.stopping)
        late = await http.post(url, json=body)
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        assert late.json()["error"]["code"] == "stopping"
        assert (await http.get("/health")).status_code == 503
        for _ in range(100):
            engine.gate.release()
        answer = await calling
        assert answer.status_code == 200
        assert "42" in answer.text
    await serving
    kinds = [kept.entry.headers["kind"] for kept in log.read()]
    log.close()
    assert kinds == ["episode_started", "model_call"]
