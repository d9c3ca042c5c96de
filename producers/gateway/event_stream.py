"""Server-sent events over HTTP, with a comment or a ping while the next event takes long.

Invariants: the status is said with the first bytes, so that an error before them still gets its own; a comment stands
between two events, never within one, and is made here, behind everything that is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from millrace.producers.gateway.errors import ApiError
from millrace.producers.gateway.protocols.all import CHAT
from millrace.producers.gateway.protocols.base import Dialect

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
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        comments = asyncio.create_task(self._comment(send)) if self._keep_alive_s else None
        try:
            # Closed also when this task is cancelled: what was sampled is recorded before anyone goes on.
            async with aclosing(self._events):
                async for events in self._events:
                    await self._say(send, events)
            await self._say(send, b"", more=False)
        except BaseException as error:
            if not self._begun:
                if comments is not None:
                    comments.cancel()
                await self._refusal(error)(scope, receive, send)
            elif isinstance(error, ApiError):
                await self._say(send, self._dialect.failed(error).sse())
                await self._say(send, b"", more=False)
            else:
                raise
        finally:
            if comments is not None:
                comments.cancel()

    async def _comment(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        self._last = clock()
        with suppress(OSError):  # the client is gone: whoever serves it notices
            while True:
                await asyncio.sleep(self._last + self._keep_alive_s - clock())
                if clock() >= self._last + self._keep_alive_s:
                    await self._say(send, self._dialect.keep_alive)

    async def _say(self, send: Send, data: bytes, *, more: bool = True) -> None:
        async with self._turn:
            if not self._begun:
                self._begun = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": more})
            self._last = asyncio.get_running_loop().time()
