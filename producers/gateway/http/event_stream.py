"""Server-sent events over HTTP, with a comment or a ping while the next event takes long.

Invariants: the status is said with the first bytes, so that an error before them still gets its own; a comment stands
between two events, never within one, and is made here, behind everything that is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from millrace.dialects.all import CHAT
from millrace.dialects.base import Dialect
from millrace.dialects.errors import ApiError

COMMENT = Dialect.keep_alive
"""what a stream is sent while its next event takes long, unless its dialect has words of its own for that"""


class EventStream(Response):
    """The response that gives `events` of a dialect, its comment after each silence of `keep_alive_s` (0: none).

    `refusal` makes the response to an error before anything was sent, or raises it."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        refusal: Callable[[BaseException], Response],
        keep_alive_s: float = 0.0,
        dialect: Dialect = CHAT,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._refusal = refusal
        self._dialect = dialect
        self._keep_alive_s = keep_alive_s
        self._begun = False
        self._last = 0.0
        """when something was sent, by the loop's clock"""
        self._sending = False
        """whether an event is on its way"""
        self._comment: asyncio.Task[None] | None = None
        """a comment that is on its way"""
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        if self._keep_alive_s:
            self._watch(send, loop)
        try:
            # Closed also when this task is cancelled: what was sampled is recorded before anyone goes on.
            async with aclosing(self._events):
                now = loop.time
                async for events in self._events:
                    if self._begun and self._comment is None:
                        # What nearly every event is: no headers, no comment on its way.
                        self._sending = True
                        await send({"type": "http.response.body", "body": events, "more_body": True})
                        self._sending = False
                        self._last = now()
                    else:
                        await self._say(send, events)
            await self._say(send, b"", more=False)
        except BaseException as error:
            if not self._begun:
                self._stop_comments()
                await self._refusal(error)(scope, receive, send)
            elif isinstance(error, ApiError):
                await self._say(send, self._dialect.failure_event(error).sse())
                await self._say(send, b"", more=False)
            else:
                raise
        finally:
            self._stop_comments()

    def _watch(self, send: Send, loop: asyncio.AbstractEventLoop) -> None:
        """Say a comment where there was silence for so long, and look again. A timer, since most streams need none: a
        task of its own costs each of them more."""
        self._last = self._last or loop.time()
        deadline = self._last + self._keep_alive_s
        if loop.time() >= deadline and not self._sending and self._comment is None:
            self._comment = loop.create_task(self._say_comment(send))
        self._timer = loop.call_at(max(deadline, loop.time() + self._keep_alive_s / 4), self._watch, send, loop)

    def _stop_comments(self) -> None:
        """No more comments."""
        if self._timer is not None:
            self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()

    async def _say_comment(self, send: Send) -> None:
        try:
            with suppress(OSError):  # the client is gone: whoever serves it notices
                await self._send_data(send, self._dialect.keep_alive, more=True)
        finally:
            self._comment = None

    async def _say(self, send: Send, data: bytes, *, more: bool = True) -> None:
        if self._comment is not None:
            await asyncio.wait([self._comment])
        self._sending = True
        try:
            await self._send_data(send, data, more=more)
        finally:
            self._sending = False

    async def _send_data(self, send: Send, data: bytes, *, more: bool) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": data, "more_body": more})
        if self._timer is not None:
            self._last = asyncio.get_running_loop().time()
