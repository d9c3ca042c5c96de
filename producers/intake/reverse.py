"""What stands before a server under another address and reads a copy of what passes: the base of the proxies.

Invariants: bodies pass unaltered and as they come, in both directions, with status and headers, but for those of one
hop, `accept-encoding` (what is compressed could not be read) and the session's key, which the server never sees; a
client that leaves ends its request to the server; what the server's answer says is kept before its last byte passes."""

from __future__ import annotations

import asyncio
import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from urllib.parse import urlsplit

import aiohttp
from aiohttp import StreamReader, web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from millrace.infra.config import is_local
from millrace.infra.errors import GatewayError
from millrace.producers.intake.capture import Capture, Side
from millrace.producers.intake.conversation import ConversationFold, Owner
from millrace.producers.intake.jsonrpc import EventCutter, WholeMessage
from millrace.producers.session_keys import session_id
from millrace.schemas import bounds

logger = logging.getLogger(__name__)

KEY_HEADER = "x-millrace-key"
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
OWN_HEADERS = {"host", "accept-encoding", KEY_HEADER}


class Exchange(ABC):
    """One request and its answer, as they are captured. `client` reads what the client sends; `added`: headers that the
    server is sent beside the client's own."""

    def __init__(self, capture: Capture, owner: Owner, fold: ConversationFold, request: web.BaseRequest) -> None:
        self.capture, self.owner, self.fold = capture, owner, fold
        self.client = capture.side(owner, fold, WholeMessage(), client=True)
        self.client.keeps_ids = True
        beside = request.headers.get("traceparent", "")
        self.client.traceparent = beside if beside.isascii() and 0 < len(beside) <= bounds.NAME_BYTES else None
        self.added: Mapping[str, str] = {}

    async def body(self, request: web.BaseRequest) -> AsyncIterable[bytes]:
        """What is sent on of a request that has a body."""
        return passing(request.content, request.content_length, self.client)

    def reader_of(self, answer: aiohttp.ClientResponse) -> Side | None:
        """Who reads the answer; None for one that says nothing or cannot be read."""
        if answer.headers.get("content-encoding", "identity") != "identity":
            self.capture.passed_unread()
            return None
        kind = answer.content_type
        if kind == "text/event-stream":
            return self.capture.side(self.owner, self.fold, EventCutter(), client=False)
        if kind == "application/json" or kind.endswith("+json"):
            return self.capture.side(self.owner, self.fold, WholeMessage(), client=False)
        return None

    def fail(self, status: int) -> None:
        """The server's answer is an error of HTTP."""
        self.client.break_off(self.client.ids, "error", f'{{"http_status":{status}}}')

    @abstractmethod
    def end(self, status: int) -> None:
        """The answer has passed."""

    @abstractmethod
    def cancel(self) -> None:
        """The client is gone."""


class ReverseProxy(ABC):
    """In front of the server at `url`, for the session of `owner` where a request names none. `host`: the address that
    it listens on."""

    def __init__(
        self,
        url: str,
        capture: Capture,
        base_url: str,
        owner: Owner | None,
        tell: Callable[[str], None],
        host: str = "127.0.0.1",
    ) -> None:
        parts = urlsplit(url)
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self.capture = capture
        self.base_url = base_url.rstrip("/")
        self._owner = owner
        self.tell = tell
        self.host = host
        self.http: aiohttp.ClientSession | None = None

    @abstractmethod
    def exchange(self, owner: Owner, request: web.BaseRequest) -> Exchange:
        """What captures a request."""

    async def open(self) -> None:
        """Make the client to the server."""
        self.http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """Let go of the server."""
        if self.http is not None:
            await self.http.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Pass one request on, and its answer back."""
        assert self.http is not None
        if is_local(self.host) and not _local(request.headers.get("host", "localhost")):
            # A page from elsewhere, open in a browser here, under a name that its owner points at this machine.
            return web.Response(status=403, text="this address serves its own machine alone, and host names another\n")
        key, path = key_in(request.raw_path)
        try:
            owner = self._owner_of(request.headers.get(KEY_HEADER) or key)
        except GatewayError as error:
            return web.Response(status=401, text=f"{error}\n")
        exchange = None if owner is None else self.exchange(owner, request)
        body: AsyncIterable[bytes] | None = None
        if request.can_read_body:
            try:
                if exchange is None:
                    body = passing(request.content, request.content_length, None)
                else:
                    body = await exchange.body(request)
            except (ConnectionError, web.RequestPayloadError):
                return web.Response(status=400, text="the request broke off\n")
        headers = passed_on(request.headers, OWN_HEADERS)
        headers["accept-encoding"] = "identity"
        headers.update(exchange.added if exchange else {})
        try:
            async with self.http.request(
                request.method,
                URL(self.origin + path, encoded=True),
                headers=headers,
                data=body,
                allow_redirects=False,
                skip_auto_headers=("user-agent", "content-type", "accept"),
            ) as answer:
                return await self.answer(request, answer, exchange)
        except aiohttp.ClientConnectionError as error:
            if exchange is not None:
                with suppress(ConnectionError, web.RequestPayloadError):
                    async for part in request.content.iter_any():  # what nobody was there to take was asked too
                        exchange.client.feed(part)
                exchange.client.end()
                exchange.fail(502)
            return web.Response(status=502, text=f"{self.origin} does not answer: {error}\n")
        except asyncio.CancelledError:
            if exchange is not None:
                exchange.cancel()
            raise

    async def answer(
        self, request: web.BaseRequest, answer: aiohttp.ClientResponse, exchange: Exchange | None
    ) -> web.StreamResponse:
        """Pass an answer back."""
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=passed_on(answer.headers))
        reader = exchange.reader_of(answer) if exchange is not None else None
        await response.prepare(request)
        try:
            async for part in passing(answer.content, answer.content_length, reader):
                await response.write(part)
        except ConnectionResetError:
            if exchange is not None:
                exchange.cancel()
            return response
        except aiohttp.ClientError as error:
            logger.warning("%s broke off: %s", self.origin, error)
            if exchange is not None:
                exchange.end(answer.status)
            # Without its end the client sees that the answer is not whole.
            if request.transport is not None:
                request.transport.abort()
            return response
        if exchange is not None:
            exchange.end(answer.status)
        await response.write_eof()
        return response

    def _owner_of(self, key: str | None) -> Owner | None:
        """Raises GatewayError for what is no session's key."""
        if key is None:
            if self._owner is None:
                self.tell("a request names no session: it is passed on and not captured")
            return self._owner
        session_id(key)
        return Owner(key, self.base_url)


async def passing(content: StreamReader, length: int | None, side: Side | None) -> AsyncIterator[bytes]:
    """A body as it comes, each part of it read before it passes, and the last of it as the last."""
    rest = length
    async for part in content.iter_any():
        if side is not None:
            side.feed(part)
            if rest is not None:
                rest -= len(part)
                if rest <= 0:
                    side.end()
        yield part
    if side is not None:
        side.end()


def _local(host: str) -> bool:
    try:
        return is_local(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def key_in(path: str) -> tuple[str | None, str]:
    """The session's key that a path begins with, and the rest of the path."""
    first, slash, rest = path.removeprefix("/").partition("/")
    return (first, f"/{rest}") if slash and first.startswith("mr-") else (None, path)


def passed_on(headers: CIMultiDictProxy[str], without: Iterable[str] = ()) -> CIMultiDict[str]:
    """The headers that are not of one hop."""
    hop_names = {name.strip().lower() for value in headers.getall("connection", []) for name in value.split(",")}
    left_out = {*HOP, *hop_names, *without}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in left_out)


async def serve(proxy: ReverseProxy, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `announce` hears the address."""
    await proxy.open()
    runner = web.ServerRunner(
        web.Server(proxy.handle, handler_cancellation=True, max_line_size=HEADER_BYTES, max_field_size=HEADER_BYTES),
        shutdown_timeout=1.0,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        announce(f"http://{host}:{_port(runner)}")
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
