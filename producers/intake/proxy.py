"""`millrace mcp --url`: a streamable HTTP server behind another port, with a copy of what passes. Both eras of MCP.

A request of the first era names its conversation in `mcp-session-id`; one that has none is a conversation of its own,
as every request of the second era is (2026-07-28, which has no sessions).

Invariants: bodies pass unaltered and as they come, in both directions, with status and headers, but for those of one
hop, `accept-encoding` (what is compressed could not be read) and the session's key, which the server never sees; a
client that leaves ends its request to the server; what the server's answer says is kept before its last byte passes."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import StreamReader, web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from millrace.infra.config import is_local
from millrace.infra.errors import GatewayError
from millrace.producers.intake.capture import Capture, Owner, Side
from millrace.producers.intake.jsonrpc import EventCutter, WholeMessage
from millrace.producers.intake.mcp import Conversation, Parked
from millrace.producers.session_keys import session_id
from millrace.schemas import bounds
from millrace.schemas.ids import new_id

logger = logging.getLogger(__name__)

KEY_HEADER = "x-millrace-key"
SESSION_HEADER = "mcp-session-id"
VERSION_HEADER = "mcp-protocol-version"
MOST = 4096
"""conversations that are kept, the newest"""
HEADER_BYTES = 64 << 10
CONNECT_S = 30.0
FLUSH_S = 5.0
HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
OURS = {"host", "accept-encoding", KEY_HEADER}
LEFT = '{"cancelled":"the client left before the result"}'
UNANSWERED = '{"error":"the answer ended without a result"}'


class ServerConversations:
    """Those of one server, by the session they are captured for. The oldest is forgotten."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._named: OrderedDict[tuple[str, str], Conversation] = OrderedDict()
        self._parked: OrderedDict[str, Parked] = OrderedDict()

    def find(self, key: str, name: str | None) -> Conversation:
        """The conversation that a request belongs to."""
        parked = self._parked.setdefault(key, Parked())
        _limited(self._parked, key)
        if name is None:
            return Conversation(self._server, _call_id, parked)
        found = self._named.setdefault((key, name), Conversation(self._server, _call_id, parked))
        _limited(self._named, (key, name))
        return found

    def forget(self, key: str, name: str | None) -> None:
        """Its client says that it is over."""
        self._named.pop((key, name or ""), None)


def _limited(kept: OrderedDict[Any, Any], newest: object) -> None:
    kept.move_to_end(newest)
    while len(kept) > MOST:
        kept.popitem(last=False)


def _call_id() -> str:
    return f"mcp-{new_id()}"


class Proxy:
    """In front of the server at `url`, for the session of `owner` where a request names none. `host`: the address that
    it listens on."""

    def __init__(
        self,
        url: str,
        server: str,
        capture: Capture,
        base_url: str,
        owner: Owner | None,
        tell: Callable[[str], None],
        host: str = "127.0.0.1",
    ) -> None:
        parts = urlsplit(url)
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._capture = capture
        self._base_url = base_url
        self._owner = owner
        self._tell = tell
        self._conversations = ServerConversations(server)
        self._local = is_local(host)
        self._http: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the client to the server."""
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """Let go of the server."""
        if self._http is not None:
            await self._http.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Pass one request on, and its answer back."""
        assert self._http is not None
        if self._local and not _local(request.headers.get("host", "localhost")):
            # A page from elsewhere, open in a browser here, under a name that its owner points at this machine.
            return web.Response(status=403, text="this address serves its own machine alone, and host names another\n")
        key, path = _key_in(request.raw_path)
        try:
            owner = self._owner_of(request.headers.get(KEY_HEADER) or key)
        except GatewayError as error:
            return web.Response(status=401, text=f"{error}\n")
        exchange = None if owner is None else _Exchange(self._capture, self._conversations, owner, request)
        body = None
        if request.can_read_body:
            body = _passing(request.content, request.content_length, exchange.asked if exchange else None)
        headers = _passed_on(request.headers, OURS)
        headers["accept-encoding"] = "identity"
        try:
            async with self._http.request(
                request.method,
                URL(self._origin + path, encoded=True),
                headers=headers,
                data=body,
                allow_redirects=False,
                skip_auto_headers=("user-agent", "content-type", "accept"),
            ) as answer:
                return await self._answer(request, answer, exchange)
        except aiohttp.ClientConnectionError as error:
            if exchange is not None:
                with suppress(ConnectionError, web.RequestPayloadError):
                    async for part in request.content.iter_any():  # what nobody was there to take was asked too
                        exchange.asked.feed(part)
                exchange.asked.end()
                exchange.failed(502)
            return web.Response(status=502, text=f"{self._origin} does not answer: {error}\n")
        except asyncio.CancelledError:
            if exchange is not None:
                exchange.left()
            raise

    async def _answer(
        self, request: web.BaseRequest, answer: aiohttp.ClientResponse, exchange: _Exchange | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=_passed_on(answer.headers))
        said = exchange.answered(answer) if exchange is not None else None
        await response.prepare(request)
        try:
            async for part in _passing(answer.content, answer.content_length, said):
                await response.write(part)
        except ConnectionResetError:
            if exchange is not None:
                exchange.left()
            return response
        except aiohttp.ClientError as error:
            logger.warning("%s broke off: %s", self._origin, error)
            if exchange is not None:
                exchange.ended(answer.status)
            # Without its end the client sees that the answer is not whole.
            if request.transport is not None:
                request.transport.abort()
            return response
        if exchange is not None:
            exchange.ended(answer.status)
        await response.write_eof()
        return response

    def _owner_of(self, key: str | None) -> Owner | None:
        """Raises GatewayError for what is no session's key."""
        if key is None:
            if self._owner is None:
                self._tell("a request names no session: it is passed on and not captured")
            return self._owner
        session_id(key)
        return Owner(key, self._base_url)


class _Exchange:
    """One request and its answer, as they are captured."""

    def __init__(
        self, capture: Capture, conversations: ServerConversations, owner: Owner, request: web.BaseRequest
    ) -> None:
        self._capture, self._owner = capture, owner
        name = request.headers.get(SESSION_HEADER)
        self._alone = name is None
        self._conversation = conversations.find(owner.key, name)
        if request.method == "DELETE":
            conversations.forget(owner.key, name)
        self.asked = capture.side(owner, self._conversation, WholeMessage(), client=True)
        self.asked.keeps_ids = True
        beside = request.headers.get("traceparent", "")
        self.asked.traceparent = beside if beside.isascii() and 0 < len(beside) <= bounds.NAME_BYTES else None

    def answered(self, answer: aiohttp.ClientResponse) -> Side | None:
        """Who reads the answer; None for one that says nothing or cannot be read."""
        if answer.headers.get("content-encoding", "identity") != "identity":
            self._capture.passed_unread()
            return None
        match answer.content_type:
            case "application/json":
                return self._capture.side(self._owner, self._conversation, WholeMessage(), client=False)
            case "text/event-stream":
                return self._capture.side(self._owner, self._conversation, EventCutter(), client=False)
        return None

    def failed(self, status: int) -> None:
        """The server's answer is an error of HTTP."""
        self.asked.break_off(self.asked.ids, "error", f'{{"http_status":{status}}}')

    def ended(self, status: int) -> None:
        """The answer has passed. In a conversation that goes on a result may come later, in another answer."""
        if status >= 400:
            self.failed(status)
        elif self._alone:
            self.asked.break_off(self.asked.ids, "error", UNANSWERED)

    def left(self) -> None:
        """The client is gone: without a session that is how it cancels."""
        if self._alone:
            self.asked.break_off(self.asked.ids, "cancelled", LEFT)


async def _passing(content: StreamReader, length: int | None, side: Side | None) -> AsyncIterator[bytes]:
    """A body as it comes, each part of it read before it passes, and the last of it as the last."""
    left = length
    async for part in content.iter_any():
        if side is not None:
            side.feed(part)
            if left is not None:
                left -= len(part)
                if left <= 0:
                    side.end()
        yield part
    if side is not None:
        side.end()


def _local(host: str) -> bool:
    try:
        return is_local(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def _key_in(path: str) -> tuple[str | None, str]:
    """The session's key that a path begins with, and the rest of the path."""
    first, slash, rest = path.removeprefix("/").partition("/")
    return (first, f"/{rest}") if slash and first.startswith("mr-") else (None, path)


def _passed_on(headers: CIMultiDictProxy[str], without: Iterable[str] = ()) -> CIMultiDict[str]:
    """The headers that are not of one hop."""
    named = {name.strip().lower() for value in headers.getall("connection", []) for name in value.split(",")}
    left_out = {*HOP, *named, *without}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in left_out)


async def serve(proxy: Proxy, host: str, port: int, told: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `told` hears the address."""
    await proxy.open()
    runner = web.ServerRunner(
        web.Server(proxy.handle, handler_cancellation=True, max_line_size=HEADER_BYTES, max_field_size=HEADER_BYTES),
        shutdown_timeout=1.0,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        told(f"http://{host}:{_port(runner)}")
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await stop.wait()
    finally:
        await runner.cleanup()
        await proxy.close()


def _port(runner: web.ServerRunner) -> int:
    return int(runner.addresses[0][1])
