"""A stranger without a key takes nothing from others: connections that say nothing are closed, and hold nobody up. A
port that is open before its gateway can answer says so."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import httpx
import pytest
from granian.server.embed import Server
from starlette.responses import PlainTextResponse

from millrace.dialects import all as dialects
from millrace.infra.errors import ServiceError
from millrace.infra.process.net import LOCALHOST, free_ports
from millrace.producers.gateway.http import listener

REQUEST = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"


@asynccontextmanager
async def served(connections: int) -> AsyncIterator[int]:
    (port,) = free_ports(1)
    server: Server = listener.make_server(PlainTextResponse("ok"), connections, LOCALHOST, port)
    task = asyncio.create_task(server.serve())
    try:
        for _ in range(500):
            try:
                _, writer = await asyncio.open_connection(LOCALHOST, port)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            writer.close()
            break
        yield port
    finally:
        server.main_loop_interrupt.set()
        server.interrupt_signal = True
        await task


async def ask(port: int) -> bytes:
    reader, writer = await asyncio.open_connection(LOCALHOST, port)
    writer.write(REQUEST)
    answer = await reader.read(1000)
    writer.close()
    return answer


@pytest.mark.parametrize("begun", [b"", b"GET / HT", REQUEST], ids=["silent", "in its headers", "behind a request"])
async def test_who_says_nothing_more_is_closed(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "SILENT_S", 1)
    async with served(16) as port:
        reader, writer = await asyncio.open_connection(LOCALHOST, port)
        writer.write(begun)
        assert begun == REQUEST or await asyncio.wait_for(reader.read(), 60) == b""
        if begun == REQUEST:
            answer = await asyncio.wait_for(reader.read(), 60)  # up to the end of the connection
            assert answer.count(b"200 OK") == 1
        writer.close()


async def test_at_the_bound_a_new_one_is_served_once_silent_ones_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "SILENT_S", 1)
    async with served(8) as port:
        silent = [await asyncio.open_connection(LOCALHOST, port) for _ in range(64)]
        assert b"200 OK" in await asyncio.wait_for(ask(port), 120)
        for _, writer in silent:
            writer.close()


async def test_the_bound_is_said_once_it_is_reached(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "LOOK_S", 0.0)
    caplog.set_level(logging.WARNING)
    watch = asyncio.create_task(listener.watch_connections(1))
    while "max_connections" not in caplog.text:
        await asyncio.sleep(0.01)
    watch.cancel()


def test_as_many_files_may_be_opened_as_connections_need() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    listener.allow_files(3000)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft >= min(3000 + listener.OTHER_FILES, hard)


async def test_a_port_that_is_open_too_early_refuses_in_the_shape_of_each_api() -> None:
    (port,) = free_ports(1)
    early = listener.Listener(100)
    early.open_public(LOCALHOST, port)
    async with httpx.AsyncClient(base_url=f"http://{LOCALHOST}:{port}", timeout=60) as http:
        await early.during(is_open(port))
        for path in ("/health", "/nothing", "/v1/sessions", *(dialect.path for dialect in dialects.DIALECTS)):
            for prefix in ("", "/session/name"):
                answer = await http.post(prefix + path, content=b"x" * 100_000)
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                assert ("type" in answer.json()) == path.endswith("/messages")
                assert answer.json()["error"]["message"] == listener.STARTING
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await session.ws_connect(f"http://{LOCALHOST}:{port}{dialects.RESPONSES.path}")
        early.lead_to(PlainTextResponse("ok"), LOCALHOST, port)
        assert (await http.get("/")).text == "ok"
    await early.close()


async def is_open(port: int) -> None:
    while True:
        try:
            await ask(port)
            break
        except OSError:
            await asyncio.sleep(0.02)


async def test_a_port_in_use_is_not_shared() -> None:
    (port,) = free_ports(1)
    first = listener.Listener(100)
    first.open_public(LOCALHOST, port)
    await first.during(is_open(port))
    with pytest.raises(ServiceError, match=rf"{port} \(Address already in use\)"):
        listener.Listener(100).open_public(LOCALHOST, port)
    await first.close()


async def test_a_server_that_ends_by_itself_ends_what_the_process_does() -> None:
    broken = listener.Listener(100)
    broken.open_socket(PlainTextResponse("ok"), Path("/nowhere/socket"))
    with pytest.raises(RuntimeError, match="No such file"):
        await asyncio.wait_for(broken.during(asyncio.sleep(3600)), 60)
    with pytest.raises(RuntimeError, match="No such file"):
        await broken.close()
