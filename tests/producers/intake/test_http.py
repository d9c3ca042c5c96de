"""`millrace mcp --url`: a real server over HTTP, both eras, plain and through us; and servers that behave oddly."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from mcp import Client, ClientSession, MCPError
from mcp.client.streamable_http import streamable_http_client

from millrace.infra.process.net import free_ports
from millrace.producers.intake.capture import Capture
from millrace.producers.intake.conversation import Owner
from millrace.producers.intake.mcp_proxy import McpProxy
from millrace.producers.intake.spool import Spool
from tests.support.gateway_world import World
from tests.support.mcp_captured import MILLRACE, SERVER, environment, pairs, recorded, until

Talk = Callable[[str], Awaitable[list[Any]]]


async def talk(client: Any) -> list[Any]:
    said: list[Any] = [sorted(tool.name for tool in (await client.list_tools()).tools)]
    for name, arguments in (("add", {"a": 3, "b": 4}), ("fail", {"why": "x"}), ("nonesuch", {})):
        try:
            said.append((await client.call_tool(name, arguments)).model_dump(mode="json", by_alias=True))
        except MCPError as error:
            said.append(str(error))
    return said


async def handshake(url: str) -> list[Any]:
    """The era of 2025-11-25."""
    async with streamable_http_client(url) as (read, write), ClientSession(read, write) as client:
        await client.initialize()
        return await talk(client)


async def stateless(url: str) -> list[Any]:
    """The era of 2026-07-28."""
    async with Client(url, mode="2026-07-28") as client:
        return await talk(client)


@asynccontextmanager
async def process(command: list[str], env: dict[str, str]) -> AsyncIterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        yield running
    finally:
        running.terminate()
        await asyncio.to_thread(running.communicate)


async def answers(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        async with asyncio.timeout(120):
            while True:
                with suppress(aiohttp.ClientConnectionError):
                    async with http.get(url):
                        return
                await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("era", [handshake, stateless])
@pytest.mark.parametrize("words", [(), ("json",), ("stateless",)])
async def test_a_client_sees_the_same_and_the_episode_has_each_call(
    tmp_path: Path, era: Talk, words: tuple[str, ...]
) -> None:
    (port,) = free_ports(1)
    plain_url = f"http://127.0.0.1:{port}/mcp"
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(process([*SERVER, str(port), *words], environment(tmp_path)))
        await answers(plain_url)
        plain = await era(plain_url)
        w = await stack.enter_async_context(recorded(tmp_path / "gateway"))
        session = await w.start()
        ours = await stack.enter_async_context(
            process(
                [*MILLRACE, "mcp", "--url", plain_url, "--server", "calc"],
                environment(tmp_path / "spool", session, f"{w.url}/v1"),
            )
        )
        assert ours.stdout is not None
        line = await asyncio.to_thread(ours.stdout.readline)
        assert line.startswith(b"listening on http://127.0.0.1:")
        assert await era(f"{line.split()[-1].decode()}/mcp") == plain
        await until(lambda: len([1 for _, result in pairs(w.events()) if result]) == 3)
        found = [(call["name"], result["status"]) for call, result in pairs(w.events(session["session"])) if result]
        assert found == [("add", "ok"), ("fail", "error"), ("nonesuch", "error")]


# ---------------------------------------------------------------------- odd servers, in this process


class Setup:
    """A server with a handler of the test's, the proxy before it, a client, and a gateway with a session."""

    def __init__(self, w: World, session: dict[str, str], url: str, http: aiohttp.ClientSession) -> None:
        self.w, self.session, self.url, self.http = w, session, url, http
        self.seen: list[tuple[Any, bytes]] = []
        """headers and body of each request that the server got"""
        self.said: list[str] = []

    async def ask(self, id: Any = 1, **more: Any) -> aiohttp.ClientResponse:
        return await self.http.post(f"{self.url}/mcp", json=call(id), **more)

    async def results(self, count: int = 1) -> list[dict[str, Any]]:
        await until(lambda: len([1 for _, result in pairs(self.w.events()) if result]) >= count)
        return [result for _, result in pairs(self.w.events()) if result]


def call(id: Any, name: str = "add") -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": name, "arguments": {"a": 1}}}


@asynccontextmanager
async def before(tmp_path: Path, handler: Any, *, named: bool = True) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        w = await stack.enter_async_context(recorded(tmp_path / "gateway"))
        session = await w.start()
        http = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        setup = Setup(w, session, "", http)

        async def noted(request: web.BaseRequest) -> web.StreamResponse:
            setup.seen.append((request.headers.copy(), b"".join([part async for part in request.content.iter_any()])))
            return await handler(request)

        upstream = await stack.enter_async_context(_served(noted))
        capture = Capture(Spool(tmp_path / "spool"), setup.said.append)
        stack.callback(capture.close, 10.0)
        base_url = f"{w.url}/v1"
        owner = Owner(session["api_key"], base_url) if named else None
        proxy = McpProxy(f"{upstream}/mcp", "calc", capture, base_url, owner, setup.said.append)
        await proxy.open()
        stack.push_async_callback(proxy.close)
        setup.url = await stack.enter_async_context(_served(proxy.handle))
        yield setup


@asynccontextmanager
async def _served(handler: Any) -> AsyncIterator[str]:
    runner = web.ServerRunner(web.Server(handler, handler_cancellation=True), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def result(id: Any, text: str = "7") -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": id, "result": {"content": [{"type": "text", "text": text}]}}).encode()


async def answered(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(body=result(1), content_type="application/json", headers={"x-odd": "ü", "set-cookie": "a=b"})


async def test_headers_and_bodies_pass_but_for_the_sessions_key(tmp_path: Path) -> None:
    async with before(tmp_path, answered, named=False) as s:
        headers = {"x-millrace-key": s.session["api_key"], "authorization": "Bearer theirs", "traceparent": "00-a-b-01"}
        async with await s.ask(headers=headers) as answer:
            assert (answer.status, await answer.read(), answer.headers["set-cookie"]) == (200, result(1), "a=b")
        ((seen, body),) = s.seen
        assert json.loads(body) == call(1)
        assert seen["authorization"] == "Bearer theirs"
        assert not any("millrace" in name.lower() or s.session["api_key"] in value for name, value in seen.items())
        await s.results()
        ((told, _),) = pairs(s.w.events(s.session["session"]))
        assert told["traceparent"] == "00-a-b-01"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "[::1", "10.0.0.1"])
async def test_no_name_but_this_machines_own_is_served(tmp_path: Path, host: str) -> None:
    async with before(tmp_path, answered) as s:
        async with await s.ask(headers={"host": host}) as answer:
            assert answer.status == 403
        assert s.seen == []


async def test_a_session_may_stand_in_the_path(tmp_path: Path) -> None:
    async with before(tmp_path, answered, named=False) as s:
        async with s.http.post(f"{s.url}/{s.session['api_key']}/mcp?x=%20y", json=call(1)) as answer:
            assert answer.status == 200
        await s.results()


async def test_who_names_no_session_is_served_and_not_captured(tmp_path: Path) -> None:
    async with before(tmp_path, answered, named=False) as s:
        async with await s.ask() as answer:
            assert await answer.read() == result(1)
        assert "a request names no session" in s.said[0]
        assert pairs(s.w.events()) == []
        async with await s.ask(headers={"x-millrace-key": "sk-1"}) as answer:
            assert answer.status == 401


async def test_events_pass_one_by_one_and_a_result_may_come_in_any_of_them(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def streamed(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b': ping\n\ndata: {"method":"notifications/progress"}\r\n\r\n')
        await go.wait()
        await response.write(b"event: message\ndata: " + result(1)[:20])
        await response.write(result(1)[20:] + b"\n\n")
        return response

    async with before(tmp_path, streamed) as s, await s.ask() as answer:
        assert await answer.content.readuntil(b"\r\n\r\n")
        assert [said for _, said in pairs(s.w.events()) if said] == []
        go.set()
        assert result(1) in await answer.read()
        (found,) = await s.results()
        assert found["status"] == "ok"


async def test_a_result_of_a_session_may_come_in_another_answer(tmp_path: Path) -> None:
    async def later(request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            body = b"".join(b"data: " + result(1, "late") + b"\n\n" for _ in range(2))  # and again, as it was resumed
            return web.Response(body=body, content_type="text/event-stream")
        return web.Response(body=b": later\n\n", content_type="text/event-stream")

    async with before(tmp_path, later) as s:
        headers = {"mcp-session-id": "one"}
        await (await s.ask(headers=headers)).read()
        await (await s.http.get(f"{s.url}/mcp", headers={"mcp-session-id": "two"})).read()
        await (await s.http.get(f"{s.url}/mcp", headers=headers)).read()
        (found,) = await s.results()
        assert "late" in found["content"]


async def test_a_client_that_leaves_cancels_and_one_of_a_session_does_not(tmp_path: Path) -> None:
    began, gone = asyncio.Event(), asyncio.Event()

    async def never(request: web.BaseRequest) -> web.StreamResponse:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        raise AssertionError

    async with before(tmp_path, never) as s:
        for headers in ({}, {"mcp-session-id": "one"}):
            began.clear(), gone.clear()
            asking = asyncio.create_task(s.ask(headers=headers))
            await began.wait()
            asking.cancel()
            await gone.wait()
        (found,) = await s.results()
        assert found["status"] == "cancelled"
        await until(lambda: len(pairs(s.w.events())) == 2)


async def test_a_client_that_leaves_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    gone = asyncio.Event()

    async def endless(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            while True:
                await response.write(b"data: {}\n\n" * 1000)
        finally:
            gone.set()

    async with before(tmp_path, endless) as s:
        answer = await s.ask()
        await answer.content.readany()
        answer.close()
        await gone.wait()
        (found,) = await s.results()
        assert found["status"] == "cancelled"


@pytest.mark.parametrize("status", [400, 404, 500])
async def test_an_error_of_http_is_the_result(tmp_path: Path, status: int) -> None:
    async def refused(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=status, text="no")

    async with before(tmp_path, refused) as s:
        async with await s.ask(headers={"mcp-session-id": "one"}) as answer:
            assert (answer.status, await answer.text()) == (status, "no")
        (found,) = await s.results()
        assert (found["status"], json.loads(found["content"])) == ("error", {"http_status": status})


async def test_a_server_that_is_away_or_breaks_off(tmp_path: Path) -> None:
    async def broken(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"id":1,')
        assert request.transport is not None
        request.transport.abort()
        return response

    async with before(tmp_path, broken) as s:
        with pytest.raises(aiohttp.ClientError):
            await (await s.ask()).read()
        (found,) = await s.results()
        assert found["status"] == "error"
    (port,) = free_ports(1)
    async with before(tmp_path / "away", broken) as s:
        capture = Capture(Spool(tmp_path / "away" / "other"), s.said.append)
        owner = Owner(s.session["api_key"], f"{s.w.url}/v1")
        proxy = McpProxy(f"http://127.0.0.1:{port}/mcp", "calc", capture, owner.base_url, owner, s.said.append)
        await proxy.open()
        async with _served(proxy.handle) as url, s.http.post(f"{url}/mcp", json=call(1)) as answer:
            assert answer.status == 502
        (found,) = await s.results()
        assert json.loads(found["content"]) == {"http_status": 502}
        await proxy.close()
        await asyncio.to_thread(capture.close, 10.0)


async def test_long_and_odd_bodies_pass_unaltered(tmp_path: Path) -> None:
    async def echo(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=s.seen[-1][1], content_type=request.content_type)

    async with before(tmp_path, echo) as s:
        for body in (b"", b"\xff\x00nonsense", b"[" * 100_000, json.dumps(call("x" * 30_000_000)).encode()):
            for kind in ("application/json", "text/event-stream", "application/octet-stream"):
                headers = {"content-type": kind}
                async with s.http.post(f"{s.url}/mcp", data=body, headers=headers) as answer:
                    assert await answer.read() == body
        assert any("could not be read" in said for said in s.said)


async def test_a_result_that_no_report_takes_leaves_its_size_and_digest(tmp_path: Path) -> None:
    async def long(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=result(1, "x" * 3_000_000), content_type="application/json")

    async with before(tmp_path, long) as s:
        await (await s.ask()).read()
        (found,) = await s.results()
        assert json.loads(found["content"])["left_out"]["bytes"] > 3_000_000
