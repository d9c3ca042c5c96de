"""Connections that say nothing, of strangers, keep nobody waiting, and are closed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.process.net import free_ports
from millrace.producers.capture.log import CaptureLog
from millrace.producers.gateway import serve as serving
from millrace.producers.gateway.calls.fleet import Fleet
from millrace.producers.gateway.calls.gateway import Gateway
from millrace.producers.gateway.http import listener
from millrace.producers.gateway.options import GatewayOptions
from millrace.producers.gateway.sessions.recorder import Recorder
from millrace.producers.gateway.sessions.sessions import Sessions
from tests.support.gateway_world import ENGINE, ScriptedEngine

SILENT = 3_000
WAIT_S = 60.0
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def is_closed(connection: Pair) -> bool:
    try:
        return await asyncio.wait_for(connection[0].read(1 << 16), WAIT_S) == b""
    except ConnectionError:
        return True


async def test_thousands_of_silent_connections_keep_nobody_waiting(
    tmp_path: Path, renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "SILENT_S", 10)
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode("Yes.<|im_end|>"))
    log = CaptureLog(tmp_path / "capture")
    fleet = Fleet("policy", lambda url: engine, (ENGINE,))
    gateway = Gateway(GatewayOptions("policy"), Sessions(log.folder, "policy"), Recorder(log), fleet, renderer)
    stop, (port,) = asyncio.Event(), free_ports(1)
    server = asyncio.create_task(serving.serve(gateway, "127.0.0.1", port, stop))
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                spoke = await asyncio.open_connection("127.0.0.1", port)
                break
            except ConnectionError:
                await asyncio.sleep(0.01)
    spoke[1].write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    assert (await spoke[0].readline()).startswith(b"HTTP/1.1 200")
    await spoke[0].read(1 << 16)
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(SILENT)]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as http:
        assert (await http.get("/health")).status_code == 200
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    assert all(await asyncio.gather(*map(is_closed, [spoke, *silent])))
    for _, writer in silent:
        writer.close()
    stop.set()
    await server
    log.close()
