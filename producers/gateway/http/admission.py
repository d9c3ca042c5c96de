"""What enters over HTTP, and how much of it at once: bodies, calls and requests of each tenant.

Invariants: no byte of a body is read before its sender is known; a body is never read beyond its limit, nor waited for
beyond its deadline; the bodies that are held, of requests in flight, have a bound together; what a visit took it gives
back when it ends, however it ends; a tenant or a key that has too much in flight is told so and delays nobody else."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive

from millrace.dialects.errors import ApiError
from millrace.infra.config import is_local
from millrace.producers.gateway.http.callers import Caller
from millrace.producers.gateway.options import GatewayOptions

DISCARD_S, DISCARD_BYTES = 2.0, 16 << 20
"""for how long, and how much, the rest of a body that is refused is read before the answer goes out"""


class RequestLimit(NamedTuple):
    """A tenant or a key, and how many of its requests there may be. `max_rate`: in a second; 0: any."""

    of: str
    name: str
    max_in_flight: int
    max_rate: float


class Intake:
    """The counts of one gateway."""

    def __init__(self, options: GatewayOptions) -> None:
        self.options = options
        self.held = 0
        """bytes of bodies"""
        self.in_flight: Counter[RequestLimit] = Counter()
        """requests of each tenant, and of each key that has a bound of its own"""
        self._rates: dict[RequestLimit, tuple[float, float]] = {}

    def enter(self, caller: Caller) -> list[RequestLimit]:
        """One request more: what it counts for. Raises ApiError 429 where one of these has too many, and counts it for
        none of them."""
        key_limits, now = self.options.limits.get(caller.key), time.monotonic()
        limits = [RequestLimit("tenant", caller.tenant, self.options.max_in_flight, self.options.max_rate)]
        if key_limits is not None:
            limits.append(
                RequestLimit(
                    "key", caller.key, key_limits.max_in_flight or self.options.max_in_flight, key_limits.max_rate or 0
                )
            )
        allowances: dict[RequestLimit, float] = {}
        for limit in limits:
            if self.in_flight[limit] >= limit.max_in_flight:
                raise _too_many(limit, f"more than {limit.max_in_flight} requests at once")
            if limit.max_rate:
                most = max(1.0, limit.max_rate)  # below one a second, one at a time
                had, then = self._rates.get(limit, (most, now))
                allowances[limit] = min(most, had + (now - then) * limit.max_rate)
                if allowances[limit] < 1:
                    raise _too_many(limit, f"more than {limit.max_rate:g} requests a second")
        self._rates |= {limit: (rest - 1, now) for limit, rest in allowances.items()}
        self.in_flight.update(limits)
        return limits

    def leave(self, limits: Iterable[RequestLimit]) -> None:
        """A request that counted for these is answered."""
        for limit in limits:
            self.in_flight[limit] -= 1
            if not self.in_flight[limit]:
                del self.in_flight[limit]


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


def check_origin(headers: Headers) -> None:
    """For a gateway without keys, which serves this machine alone: a page from elsewhere, open in a browser here, must
    not speak to it, neither directly nor under a name that its owner points here. Raises ApiError 403."""
    for name, url in (("host", f"//{headers.get('host', 'localhost')}"), ("origin", headers.get("origin"))):
        if url is None:
            continue
        try:
            local = is_local(urlsplit(url).hostname or "")
        except ValueError:
            local = False
        if not local:
            raise ApiError(
                403,
                f"A gateway without keys serves this machine alone, and the header {name} names another: "
                "set [gateway.keys]",
                code="foreign_origin",
            )


def _too_many(limit: RequestLimit, excess: str) -> ApiError:
    message = f"This {limit.of} has {excess}: try again"
    return ApiError(429, message, type="rate_limit_error", code="rate_limited", retry_after_s=1)
