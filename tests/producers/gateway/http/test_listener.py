"""A stranger without a key takes nothing from others: connections that say nothing are closed, and hold nobody up. A
port that is open before its gateway can answer says so."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from granian.server.embed import Server
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse

from millrace.dialects import all as dialects
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.engines.upstream import TextUpstream
from millrace.infra.errors import ServiceError
from millrace.infra.process.net import LOCALHOST, free_ports
from millrace.producers.gateway.http import listener
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams
from tests.support.fake_http import serving
from tests.support.gateway_world import ScriptedEngine, world

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
                assert answer.headers["x-request-id"]
                assert ("type" in answer.json()) == path.endswith("/messages")
                assert answer.json()["error"]["message"] == listener.STARTING
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await session.ws_connect(f"http://{LOCALHOST}:{port}{dialects.RESPONSES.path}")
        early.lead_to(PlainTextResponse("ok"), LOCALHOST, port)
        assert (await http.get("/")).text == "ok"
    await early.close()


headers = st.lists(st.tuples(st.sampled_from((b"host", b"x-request-id", b"x-a")), st.binary(max_size=140)), max_size=5)
ids = st.one_of(st.none(), st.from_regex(rb"[!-~]{1,200}", fullmatch=True), st.binary(max_size=9))


@given(headers, ids, headers)
def test_every_answer_names_its_request(sent: Any, given_id: bytes | None, answered: Any) -> None:
    scope = {"headers": [*sent, *([] if given_id is None else [(b"x-request-id", given_id)])]}
    before, messages = list(scope["headers"]), list[Any]()

    async def send(message: Any) -> None:
        messages.append(message)

    async def play() -> None:
        answer = listener.with_id(scope, send)
        await answer({"type": "http.response.start", "status": 200, "headers": list(answered)})
        await answer({"type": "http.response.body", "body": b"x"})

    asyncio.run(play())
    start, body = messages
    assert body == {"type": "http.response.body", "body": b"x"}
    has_id = b"x-request-id" in dict(answered)
    id = dict(start["headers"])[b"x-request-id"]
    assert start["headers"] == [*answered, *([] if has_id else [(b"x-request-id", id)])]
    own = dict(before).get(b"x-request-id")
    assert scope["headers"][: len(before)] == before, "what a client sent stays"
    assert len(scope["headers"]) == len(before) + (own is None)
    if not has_id and own is not None:
        assert (id == own) == bool(re.fullmatch(rb"[!-~]{1,128}", own))
    elif not has_id:
        assert scope["headers"][-1] == (b"x-request-id", id)


async def test_answers_of_every_kind_have_an_id(tmp_path: Path, renderer: TemplateRenderer) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode("x<|im_end|>"))
    async with serving(_of_an_upstream) as far:
        upstreams = Upstreams([Upstream("far", TextUpstream(far.url), frozenset({"chat"}))], [RouteRule("far", "far")])
        async with world(tmp_path, renderer, engine, upstream=upstreams) as w:
            cases: list[tuple[str, str, Any, int]] = [
                ("POST", "/v1/chat/completions", asked, 200),
                ("POST", "/v1/chat/completions", {**asked, "stream": True}, 200),
                ("POST", "/v1/messages", {}, 400),
                ("POST", "/v1/sessions", {}, 200),
                ("GET", "/health", None, 200),
                ("GET", "/nothing", None, 404),
                ("PUT", "/health", None, 405),
            ]
            seen = set()
            for method, path, body, status in cases:
                got = await w.http.request(method, path, json=body)
                assert got.status_code == status
                seen.add(got.headers["x-request-id"])
                got = await w.http.request(method, path, json=body, headers={"x-request-id": "mine-7"})
                assert got.headers.get_list("x-request-id") == ["mine-7"]
            assert len(seen) == len(cases)
            got = await w.http.post(cases[0][1], json={**asked, "model": "far"}, headers={"x-request-id": "mine-7"})
            assert got.headers.get_list("x-request-id") == ["far-1"]


async def _of_an_upstream(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 X\r\nx-request-id: far-1\r\ncontent-length: 2\r\n\r\n{}")


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
