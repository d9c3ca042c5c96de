"""The thin client of HTTP: whatever a server sends, and however it is cut."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.infra.engines.http_client import HEADER_BYTES, MOST_UNREAD, HttpClient
from tests.support.fake_http import FakeServer, Script, answer, hang_up, serving, stay_silent, stream

RUNNERS: list[Callable[[Coroutine[Any, Any, None]], None]] = [asyncio.run, uvloop.run]
OK = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def client_of(server: FakeServer, idle_s: float = 60.0, silence_s: float = 60.0) -> AsyncIterator[HttpClient]:
    """A client of this server."""
    client = HttpClient(server.url, connect_s=60.0, idle_s=idle_s, silence_s=silence_s)
    try:
        yield client
    finally:
        await client.close()


async def post(client: HttpClient, body: bytes = b"{}") -> tuple[int, bytes]:
    """Status and body of one request."""
    connection = await client.connect()
    reply = await connection.ask(client.head("POST", "/path", {"x-header": "text"}), body)
    return reply.status, await reply.read()


def raw(parts: list[bytes], peers: list[object], *, then_close: bool = False) -> Script:
    """An answer of these bytes; notes which connection it came by."""

    async def script(writer: asyncio.StreamWriter) -> None:
        peers.append(writer.get_extra_info("peername"))
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if then_close:
            writer.close()

    return script


@st.composite
def answers(draw: st.DrawFn) -> tuple[bytes, bytes, bool]:
    """The bytes of an answer, its body, and whether the server keeps the connection."""
    body = draw(st.binary(max_size=200))
    announced = draw(st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Hints\r\nlink: x\r\n\r\n"]))
    closes = draw(st.booleans())
    head = announced + OK + (b"connection: close\r\n" if closes else b"") + b"X-Odd:  a \r\n"
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    if framing == "length":
        return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body), body, not closes
    if framing == "close":
        return head + b"\r\n" + body, body, False
    cuts = sorted({0, len(body), *draw(st.lists(st.integers(0, len(body)), max_size=4))})
    sizes = [body[start:end] for start, end in pairwise(cuts)]
    chunks = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in sizes)
    return head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n", body, not closes


@pytest.mark.parametrize("run", RUNNERS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_an_answer_that_is_cut_anywhere_is_the_same(
    run: Callable[[Coroutine[Any, Any, None]], None], data: st.DataObject
) -> None:
    wire, body, keeps = data.draw(answers())
    cuts = sorted({0, len(wire), *data.draw(st.lists(st.integers(0, len(wire)), max_size=6))})
    parts = [wire[start:end] for start, end in pairwise(cuts)]
    peers: list[object] = []

    async def twice() -> None:
        async with serving(raw(parts, peers, then_close=not keeps)) as server, client_of(server) as client:
            assert await post(client) == (200, body)
            assert await post(client, b"x" * 100_000) == (200, body)
            head, sent = server.requests[1]
            assert head.startswith("POST /path HTTP/1.1\r\nhost: 127.0.0.1:")
            assert "\r\nx-header: text\r\n" in head
            assert sent == b"x" * 100_000

    run(twice())
    assert (peers[0] == peers[1]) == keeps


BROKEN: dict[str, Script] = {
    "hangs up": hang_up,
    "no HTTP": raw([b"SSH-2.0-OpenSSH_9\r\n"], []),
    "half a status": raw([b"HTTP/1.1 2"], [], then_close=True),
    "half of its length": raw([OK + b"content-length: 10\r\n\r\nabc"], [], then_close=True),
    "half a chunk": raw([OK + b"transfer-encoding: chunked\r\n\r\n5\r\nab"], [], then_close=True),
    "no last chunk": stream(b"abc", then="cut"),
    "no chunk": raw([OK + b"transfer-encoding: chunked\r\n\r\nxyz\r\n"], []),
    "endless headers": raw([OK + b"x: " + b"y" * 1000 + b"\r\n"] + [b"x: " + b"y" * 1000 + b"\r\n"] * 100, []),
    "another protocol": raw([b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"], []),
}


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_off_is_said_and_bears_no_other_request(
    name: str, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    assert HEADER_BYTES < 100_000

    async def break_off() -> None:
        async with serving(BROKEN[name], answer(b"sound")) as server, client_of(server) as client:
            with pytest.raises(ConnectionError):
                await post(client)
            assert await post(client) == (200, b"sound")

    run(break_off())


@pytest.mark.parametrize("run", RUNNERS)
def test_bytes_behind_an_answer_belong_to_no_other(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    one = OK + b"content-length: 3\r\n\r\none"

    async def behind() -> None:
        async with serving(raw([one + one], []), answer(b"two")) as server, client_of(server) as client:
            assert await post(client) == (200, b"one")
            assert await post(client) == (200, b"two")

    run(behind())


async def test_silence_ends_only_what_is_waited_for() -> None:
    async with serving(stream(b"part", then="hang")) as server, client_of(server, silence_s=0.2) as client:
        reply = await (await client.connect()).ask(client.head("POST", "/", {}))
        await asyncio.sleep(0.5)
        assert await reply.take() == b"part"
        with pytest.raises(TimeoutError):
            await reply.take()
    async with serving(stay_silent) as server, client_of(server, silence_s=0.2) as client:
        with pytest.raises(TimeoutError):
            await post(client)


@pytest.mark.parametrize("run", RUNNERS)
def test_a_slow_reader_holds_up_its_server(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    written, size, count = 0, 1 << 20, 64

    async def script(writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(OK + b"content-length: %d\r\n\r\n" % (size * count))
        for _ in range(count):
            writer.write(bytes(size))
            await writer.drain()
            written += size

    async def slowly() -> None:
        async with serving(script) as server, client_of(server) as client:
            reply = await (await client.connect()).ask(client.head("POST", "/", {}))
            before = -1
            while before != written:
                before = written
                await asyncio.sleep(0.3)
            assert written < size * count
            first = await reply.take()
            assert len(first) <= 2 * MOST_UNREAD
            assert len(first) + len(await reply.read()) == size * count

    run(slowly())


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("reply", [b"", OK + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"], ids=["none", "a part"])
def test_a_server_learns_that_nobody_waits(run: Callable[[Coroutine[Any, Any, None]], None], reply: bytes) -> None:
    async def leave() -> None:
        asked, left = asyncio.Event(), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
            asked.set()
            await reader.read()
            left.set()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, client_of(FakeServer([], url)) as client:
            connection = await client.connect()
            asking = asyncio.create_task(connection.ask(client.head("POST", "/", {})))
            await asked.wait()
            if reply:
                got = await asking
                assert await got.take() == b"abc"
                got.close()
                got.close()
            else:
                asking.cancel()
            await asyncio.wait_for(left.wait(), 60)

    run(leave())


async def test_connections_that_lie_unused_are_closed() -> None:
    peers: list[object] = []
    async with (
        serving(raw([OK + b"content-length: 0\r\n\r\n"], peers)) as server,
        client_of(server, idle_s=0.1) as client,
    ):
        await post(client)
        await post(client)
        while client.count:
            await asyncio.sleep(0.01)
        await post(client)
    assert peers[0] == peers[1] != peers[2]


@pytest.mark.parametrize("script", [answer(b"sound"), stream(b"sound")], ids=["at once", "streamed"])
async def test_an_answer_that_was_read_is_freed_at_once(script: Script) -> None:
    gc.disable()
    try:
        async with serving(script) as server, client_of(server) as client:
            reply = await (await client.connect()).ask(client.head("POST", "/", {}))
            assert await reply.read() == b"sound"
            place = weakref.ref(reply)
            del reply
            await asyncio.sleep(0)
            assert place() is None
    finally:
        gc.enable()


async def test_a_header_is_one_line() -> None:
    client = HttpClient("http://user:p%40ss@engine.test:80/below/", connect_s=1, idle_s=1, silence_s=1)
    head = client.head("GET", "/v1", {"authorization": "Bearer a"})
    assert head.startswith(b"GET /below/v1 HTTP/1.1\r\nhost: engine.test:80\r\n")
    assert b"\r\nauthorization: Basic dXNlcjpwQHNz\r\n" in head
    with pytest.raises(ValueError, match="end of a line"):
        client.head("GET", "/", {"authorization": "Bearer a\r\nx: y"})
