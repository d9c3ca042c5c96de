"""Responses over a WebSocket: each `response.create` frame is a request, and the events of its stream come back as
frames.

Invariants: one call at a time a socket, and what comes meanwhile is refused; a frame that is no request is an `error`
event and disturbs nothing else; a client that leaves ends its call, and so does the end of the call's session; frames,
their bytes in memory, sockets of a tenant and silence between calls have bounds; a call is what the same request would
be over HTTP, in the log as well."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import msgspec
import orjson
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from millrace.dialects import shape
from millrace.dialects.base import Dialect
from millrace.dialects.errors import ApiError, bad_request
from millrace.infra.process.offload import run_aside
from millrace.producers.gateway.calls.gateway import Gateway
from millrace.producers.gateway.http.admission import Intake
from millrace.producers.gateway.http.callers import Caller
from millrace.schemas import bounds

logger = logging.getLogger(__name__)

CREATE = "response.create"
TICK_S = 1.0
"""how often a socket without a call looks whether the gateway stops"""
GOING_AWAY, TOO_BIG = 1001, 1009
Answer = Callable[[Caller, Headers, bytes], AsyncGenerator[bytes, None]]
"""the server-sent events that answer a request; raises ApiError before the first of them"""


class Sockets:
    """The open ones of one gateway, which speak `dialect`."""

    def __init__(
        self, gateway: Gateway, intake: Intake, dialect: Dialect, answer: Answer, identify: Callable[[Headers], Caller]
    ) -> None:
        self.gateway = gateway
        self.intake = intake
        self.dialect = dialect
        self.answer = answer
        self.identify = identify
        self.open: Counter[str] = Counter()
        """by tenant"""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One socket, until its client leaves. Raises ApiError before it is accepted."""
        await receive()  # websocket.connect
        headers = Headers(scope=scope)
        self.gateway.check_open()
        caller = self.identify(headers)
        caller.check_may("call")
        if self.open[caller.tenant] >= self.intake.options.max_in_flight:
            message = f"This tenant has more than {self.intake.options.max_in_flight} sockets open: try again"
            raise ApiError(429, message, type="rate_limit_error", code="rate_limited", retry_after_s=1)
        self.open[caller.tenant] += 1
        try:
            await send({"type": "websocket.accept"})
            await _Socket(self, caller, headers, receive, send).serve()
        finally:
            self.open[caller.tenant] -= 1
            if not self.open[caller.tenant]:
                del self.open[caller.tenant]


class _Socket:
    """One of them."""

    def __init__(self, sockets: Sockets, caller: Caller, headers: Headers, receive: Receive, send: Send) -> None:
        self._sockets = sockets
        self._caller = caller
        self._headers = headers
        self._receive = receive
        self._send = send
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()
        self._busy = False
        self._left = False
        self._turn = asyncio.Lock()

    async def serve(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        reading = asyncio.create_task(self._read(task))
        try:
            await self._work()
        except (asyncio.CancelledError, OSError, RuntimeError):
            if not self._left:
                raise
            logger.info("a client left its socket")
        finally:
            reading.cancel()

    async def _work(self) -> None:
        gateway, clock = self._sockets.gateway, asyncio.get_running_loop().time
        since = clock()
        while not gateway.stopping and clock() - since < bounds.SOCKET_IDLE_S:
            try:
                async with asyncio.timeout(TICK_S):
                    frame = await self._frames.get()
            except TimeoutError:
                continue
            await self._answer(frame)
            since = clock()
        await self._close(GOING_AWAY)

    async def _answer(self, frame: bytes) -> None:
        """One call, in a task of its own: what ends its session ends the call, and not the socket. Raises what ends the
        socket."""
        call = asyncio.create_task(self._call(frame))
        try:
            await asyncio.wait([call])
        finally:
            # The client left: its call ends at once, and is recorded before the socket is gone.
            call.cancel()
            await asyncio.wait([call])
        if not call.cancelled():
            return call.result()
        message = "This call was cut off: its session has ended, or the gateway stops"
        await self._fail(ApiError(503, message, type="server_error", code="cut_off"))

    async def _read(self, task: asyncio.Task[None]) -> None:
        """Frames as they come, also while a call runs, so that its end is known."""
        limit = self._sockets.intake.options.max_body_bytes
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                break
            frame = _bytes(message)
            if len(frame) > limit:
                text = f"The frame is larger than {limit} bytes"
                await self._fail(ApiError(413, text, code="request_too_large"))
                await self._close(TOO_BIG)
                break
            if self._busy:
                text = "A response is being made on this socket: wait for its end, or open another socket"
                await self._fail(ApiError(409, text, code="response_in_progress"))
                continue
            self._busy = True
            self._frames.put_nowait(frame)
        self._left = True
        task.cancel()

    async def _call(self, frame: bytes) -> None:
        """One response, or an event that says why there is none. Raises what ends the socket."""
        sockets, intake = self._sockets, self._sockets.intake
        limits = None
        intake.held += len(frame)
        try:
            sockets.gateway.check_open()
            limits = intake.enter(self._caller)
            if intake.held > intake.options.max_bodies_bytes:
                message = f"The gateway holds {intake.options.max_bodies_bytes} bytes of requests: try again"
                raise ApiError(503, message, type="server_error", code="busy", retry_after_s=1)
            body = await run_aside(len(frame), request_of, frame)
            async with aclosing(sockets.answer(self._caller, self._headers, body)) as events:
                async for data in _data(events):
                    await self._say(data)
        except ApiError as error:
            await self._fail(error)
        except OSError:
            raise
        except Exception:
            logger.exception("a call over a socket failed")
            await self._fail(ApiError(500, "The gateway failed: see its log", type="server_error", code="internal"))
        finally:
            intake.held -= len(frame)
            if limits is not None:
                intake.leave(limits)
            self._busy = False  # here, so that whoever saw the last event may ask again at once

    async def _fail(self, error: ApiError) -> None:
        event = orjson.loads(self._sockets.dialect.failure_event(error).data)
        await self._say(orjson.dumps({**event, "status": error.status}))

    async def _say(self, data: bytes) -> None:
        async with self._turn:
            await self._send({"type": "websocket.send", "text": data.decode()})

    async def _close(self, code: int) -> None:
        async with self._turn:
            await self._send({"type": "websocket.close", "code": code})


def request_of(frame: bytes) -> bytes:
    """The body that a frame would be over HTTP. Raises ApiError 400."""
    try:
        members = msgspec.json.decode(frame, type=dict[str, msgspec.Raw])
        kind = msgspec.json.decode(members.pop("type", b"null"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise shape.json_refusal(frame, error, "frame") from None
    if kind != CREATE:
        raise bad_request(f"type: only {CREATE} is served on this socket", param="type", code="unsupported_event")
    return msgspec.json.encode({**members, "stream": True})


async def _data(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, which come whole."""
    async for together in events:
        for event in together.replace(b"\r\n", b"\n").split(b"\n\n"):
            lines = [line.removeprefix(b"data:").strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            data = b"\n".join(lines)
            if data and data != b"[DONE]":
                yield data


def _bytes(message: Message) -> bytes:
    """What a frame holds, of either kind."""
    text = message.get("text")
    return text.encode(errors="surrogatepass") if text is not None else message.get("bytes") or b""
