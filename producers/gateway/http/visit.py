"""One request while it is answered: its sender, its body within bounds, and the client that may leave meanwhile.

Invariants: no byte of a body is read before its sender is known; a body is never read beyond its limit, nor waited for
beyond its deadline; the bodies that are held, of requests in flight, have a bound together; once a client is gone its
call is cancelled; what a visit took it gives back when it ends, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive

from millrace.dialects.errors import ApiError
from millrace.producers.gateway.http.admission import Intake, RequestLimit
from millrace.producers.gateway.http.callers import Caller

DISCARD_S, DISCARD_BYTES = 2.0, 16 << 20
"""for how long, and how much, the rest of a body that is refused is read before the answer goes out"""


class Visit:
    """One request. Close it when its answer is sent."""

    def __init__(self, intake: Intake, receive: Receive) -> None:
        self._intake = intake
        self._receive = receive
        self._counted: list[RequestLimit] = []
        self._held = 0
        self._watch: asyncio.Task[None] | None = None
        self._is_read = False
        """the whole body has come"""
        self.left = False
        """the client is gone"""

    def enter(self, caller: Caller) -> Caller:
        """The sender is known. Raises ApiError 429 when its tenant, or its key, has too much in flight."""
        self._counted = self._counted or self._intake.enter(caller)
        return caller

    async def body(self, request: Request, encodings: Collection[str] = ()) -> bytes:
        """The whole body, as it came: plain, or in one of `encodings`. Raises ApiError as soon as it is known to be in
        another, too large, too slow, or one too many."""
        intake, options = self._intake, self._intake.options
        if (encoding := encoding_of(request.headers)) and encoding not in encodings:
            ways = ", ".join(("as it is, without the header", *encodings))
            raise ApiError(
                415,
                f"A body in content-encoding {encoding[:40]!r} is not read here: send it {ways}",
                code="unsupported_encoding",
            )
        limit = options.max_body_bytes
        too_large = ApiError(413, f"The request is larger than {limit} bytes", code="request_too_large")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and (len(length) > len(str(limit)) or int(length) > limit):
            raise too_large
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(options.body_timeout_s):
                more = True
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "The request ended in the middle of its body", code="request_cut_off")
                    part, more = message.get("body", b""), message.get("more_body", False)
                    self._held += len(part)
                    intake.held += len(part)
                    if self._held > limit:
                        raise too_large
                    if intake.held > options.max_bodies_bytes:
                        raise ApiError(
                            503,
                            f"The gateway holds {options.max_bodies_bytes} bytes of requests: try again",
                            type="server_error",
                            code="busy",
                            retry_after_s=1,
                        )
                    if part:
                        parts.append(part)
            self._is_read = True
        except TimeoutError:
            raise ApiError(
                408, f"The body did not come within {options.body_timeout_s:g} s", code="request_timeout"
            ) from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def discard(self) -> None:
        """Let the rest of a body pass before its refusal: `discard`. A stranger's is not read."""
        if self._counted and not self._is_read:
            self._is_read = True
            await discard(self._receive)

    def watch(self) -> None:
        """From here on the current task is cancelled when the client goes. The body must have been read."""
        task = asyncio.current_task()
        assert task is not None
        self._watch = asyncio.create_task(self._leave(task))

    async def _leave(self, task: asyncio.Task[Any]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.left = True
        task.cancel()

    def close(self) -> None:
        """Give back what it took. Idempotent."""
        self._intake.held -= self._held
        self._held = 0
        self._intake.leave(self._counted)
        self._counted = []
        if self._watch is not None:
            self._watch.cancel()


def encoding_of(headers: Headers) -> str:
    """How a body is compressed, "" for one that is not."""
    encoding = headers.get("content-encoding", "").strip().lower()
    return "" if encoding == "identity" else encoding


async def discard(receive: Receive) -> None:
    """Read what a client still sends, within bounds, and keep nothing. A server closes a connection on which an answer
    went out before its request had come, and the client that was still sending sees a reset in place of the answer."""
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while size < DISCARD_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body"):
                    return
