"""HTTP/1.1 to one server at the price of its bytes: a client for what is asked thousands of times a second, and
answered a token at a time.

llhttp (`httptools`) reads what comes; a connection bears one request at a time and is used again once its answer came
to its end. Nothing follows redirects, keeps cookies or takes compressed answers: an engine has none of these.

Invariants: an answer is never longer in memory than `MOST_UNREAD` and one read beyond it, however slow its reader; a
connection on which anything unforeseen came bears no other request; closing an answer that has not come to its end
closes its connection, by which the server learns that nobody waits for it."""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections.abc import Mapping
from typing import cast
from urllib.parse import unquote, urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

MOST_UNREAD = 2 << 20
"""bytes of an answer that wait for their reader before the connection is read no further"""
HEADER_BYTES = 64 << 10
"""of all headers of an answer together"""


class HttpClient:
    """The connections to the server of `url`. `idle_s`: how long one may lie unused; `silence_s`: how long an answer
    may be silent while somebody waits for it. Create it inside the event loop that uses it."""

    def __init__(self, url: str, *, connect_s: float, idle_s: float, silence_s: float) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        self._head = f"\r\nhost: {parts.netloc.rpartition('@')[2]}\r\naccept: */*\r\n"
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._head += f"authorization: Basic {b64encode(user.encode()).decode()}\r\n"
        self._connect_s = connect_s
        self._idle_s = idle_s
        self.silence_s = silence_s
        self._idle: list[tuple[float, _Connection]] = []
        self._sweep: asyncio.TimerHandle | None = None
        self._connections: set[_Connection] = set()

    async def connect(self) -> _Connection:
        """A connection that bears no request: the one used last, or a new one. Raises OSError, TimeoutError too."""
        while self._idle:
            _, connection = self._idle.pop()
            if connection.is_open:
                return connection
        connection = _Connection(self)
        async with asyncio.timeout(self._connect_s):
            await asyncio.get_running_loop().create_connection(
                lambda: connection, self._host, self._port, ssl=self._ssl
            )
        return connection

    def head(self, method: str, path: str, headers: Mapping[str, str]) -> bytes:
        """The first lines of requests, up to how long each is. Raises ValueError for a header that is none."""
        lines = "".join(f"{name}: {text}\r\n" for name, text in headers.items())
        if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
            raise ValueError("a header must not hold the end of a line")
        return f"{method} {self._path}{path} HTTP/1.1{self._head}{lines}content-length: ".encode()

    @property
    def count(self) -> int:
        """How many connections are open."""
        return len(self._connections)

    def add(self, connection: _Connection) -> None:
        """A connection is there."""
        self._connections.add(connection)

    def discard(self, connection: _Connection) -> None:
        """A connection is gone."""
        self._connections.discard(connection)

    def keep(self, connection: _Connection) -> None:
        """A connection bears no request any more: the next one may have it."""
        loop = asyncio.get_running_loop()
        self._idle.append((loop.time(), connection))
        if self._sweep is None:
            self._sweep = loop.call_later(self._idle_s, self._close_idle)

    def _close_idle(self) -> None:
        """Close what has lain unused for so long: a server closes it too, and a request that meets that is lost."""
        loop = asyncio.get_running_loop()
        limit = loop.time() - self._idle_s
        for since, connection in self._idle:
            if since <= limit:
                connection.close()
        self._idle = [(since, connection) for since, connection in self._idle if connection.is_open]
        at = self._idle[0][0] + self._idle_s if self._idle else None
        self._sweep = None if at is None else loop.call_at(at, self._close_idle)

    async def close(self) -> None:
        """Let go of every connection. Idempotent."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in list(self._connections):
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # the loop closes them in its next turn


class _Connection(asyncio.Protocol):
    """One connection, which bears one request at a time."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._answer: HttpAnswer | None = None

    @property
    def is_open(self) -> bool:
        """Whether it can bear a request."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, head: bytes, body: bytes = b"") -> HttpAnswer:
        """The answer to a request, once its headers came; `head` is what `HttpClient.head` made. Raises TimeoutError,
        and ConnectionError where the connection ended before an answer. Whoever is cancelled here closes it."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the server closed the connection")
        self._answer = answer = HttpAnswer(self, self._client.silence_s)
        transport.write(b"%b%d\r\n\r\n%b" % (head, len(body), body))
        try:
            await answer.begin()
        except BaseException:
            answer.close()
            raise
        return answer

    def close(self) -> None:
        """End it, whatever it bears."""
        if self._transport is not None:
            self._transport.close()

    def flow(self, *, is_on: bool) -> None:
        """Read on, or no further for now."""
        if self._transport is not None and not self._transport.is_closing():
            if is_on:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def leave(self, *, is_sound: bool) -> None:
        """Its answer has come to its end. `is_sound`: the server keeps the connection."""
        self._answer = None
        if is_sound and self.is_open:
            self._client.keep(self)
        else:
            self.close()

    # ------------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are that without being its subclasses
        self._client.add(self)

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self.close()  # nothing was asked
        else:
            self._answer.feed(data)

    def eof_received(self) -> None:
        if self._answer is not None:
            self._answer.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.discard(self)
        if self._answer is not None:
            self._answer.break_off(ConnectionResetError(str(exc or "the server closed the connection")))


class HttpAnswer:
    """An answer whose body is still coming. `headers` are those of lower-case names, the last of each."""

    def __init__(self, connection: _Connection, silence_s: float) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._connection = connection
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._parser = HttpResponseParser(self)
        self._header_bytes = 0
        self._parts: list[bytes] = []
        self._unread = 0
        self._is_paused = False
        self._has_ended = False
        self._error: OSError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._last = self._loop.time()
        """when something came"""
        self._timer: asyncio.TimerHandle | None = self._loop.call_at(self._last + silence_s, self._watch)

    async def begin(self) -> None:
        """Return once the headers are here. Raises ConnectionError and TimeoutError."""
        while not self.status:
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            await self._waiter

    async def take(self) -> bytes:
        """What came since, as soon as there is anything; nothing at the end. Raises ConnectionError where it breaks
        off, TimeoutError."""
        while not (parts := self._parts):
            if self._has_ended:
                return b""
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            await self._waiter
        self._parts, self._unread = [], 0
        if self._is_paused:
            self._is_paused, self._last = False, self._loop.time()
            self._connection.flow(is_on=True)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def read(self) -> bytes:
        """All of the body. Raises what `take` does."""
        parts = []
        while part := await self.take():
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Nobody reads on: the connection ends, unless all of the answer came. Idempotent."""
        if not self._has_ended and self._error is None:
            self.break_off(ConnectionAbortedError("the answer was closed"))
            self._connection.leave(is_sound=False)

    # ------------------------------------------------------------------ called by the connection

    def feed(self, data: bytes) -> None:
        """What the server sent."""
        self._last = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.break_off(ConnectionError(f"this is no HTTP: {error.__context__ or error}"))
            self._connection.leave(is_sound=False)
        if self._unread > MOST_UNREAD and not self._is_paused and not self._has_ended:
            self._is_paused = True
            self._connection.flow(is_on=False)
        if self._waiter is not None:
            self._wake()

    def end(self) -> None:
        """The server says no more, which ends a body of no other end."""
        has_frame = "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "")
        if self.status and not has_frame:
            self._finish(is_sound=False)
            self._wake()

    def break_off(self, error: OSError) -> None:
        """No more will come."""
        if self._has_ended or self._error is not None:
            return
        self._error = error
        self._let_go()
        self._wake()

    # ------------------------------------------------------------------ called by the parser

    def on_message_begin(self) -> None:
        """Raises ConnectionError for a second answer to one request."""
        if self._has_ended:
            raise ConnectionError("it goes on behind its end")
        self.headers.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Raises ConnectionError for too many."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > HEADER_BYTES:
            raise ConnectionError(f"its headers have more than {HEADER_BYTES} bytes")
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """What is below 200 announces the answer."""
        status = self._parser.get_status_code()
        self.status = status if status >= 200 else 0

    def on_body(self, body: bytes) -> None:
        """A part of it."""
        self._parts.append(body)
        self._unread += len(body)

    def on_message_complete(self) -> None:
        """Its end, or that of an announcement."""
        if self.status:
            self._finish(is_sound=self._parser.should_keep_alive())

    # ------------------------------------------------------------------ waiting

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _watch(self) -> None:
        """Break off where somebody has waited for so long, and look again. A timer, which is not set anew for what
        comes: that would cost each token more."""
        now, deadline = self._loop.time(), self._last + self._silence_s
        if now >= deadline and self._waiter is not None:
            self._timer = None
            self.break_off(TimeoutError(f"nothing came for {self._silence_s} s"))
            self._connection.leave(is_sound=False)
            return
        self._timer = self._loop.call_at(max(deadline, now + self._silence_s / 4), self._watch)

    def _let_go(self) -> None:
        """Nothing is read any more: nothing that knows this answer stays."""
        del self._parser
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _finish(self, *, is_sound: bool) -> None:
        self._has_ended = True
        self._let_go()
        self._connection.leave(is_sound=is_sound and not self._is_paused)
