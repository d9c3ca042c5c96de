"""The gateway over HTTP: routes, sizes, errors in OpenAI's shape.

Invariants: every answer that is not a success is an OpenAI error object, whatever went wrong; a body is never read
beyond its limit; when a client goes away in the middle of a stream, the stream is closed at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from producers.engines.openai_upstream import TextUpstream
from producers.gateway.episodes import Episodes
from producers.gateway.errors import ApiError
from producers.gateway.gateway import Gateway
from producers.gateway.passthrough import Passthrough

logger = logging.getLogger(__name__)

JSON = "application/json"
CHAT = "/v1/chat/completions"
Handler = Callable[[Request], Awaitable[Response]]


class EventStream(Response):
    """Server-sent events. The first is awaited before the status is sent, so that errors still get theirs."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump, gone = asyncio.create_task(self._pump(send)), asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Also when this task is cancelled: what was sampled is recorded before anyone goes on.
            gone.cancel()
            pump.cancel()
            await asyncio.wait((pump, gone))
        if pump.cancelled() or isinstance(pump.exception(), OSError):
            logger.info("a client went away in the middle of a stream")
        else:
            pump.result()

    async def _pump(self, send: Send) -> None:
        async with aclosing(self._rest):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for event in self._rest:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def make_app(gateway: Gateway, upstream: TextUpstream | None = None) -> ASGIApp:
    """The application, before engines or before one text-only upstream. Lifecycle is the caller's."""
    episodes = Episodes(gateway)
    limit = gateway.options.max_body_bytes
    through = Passthrough(gateway, upstream) if upstream is not None else None

    async def chat(request: Request) -> Response:
        body = await _body(request, limit)
        call = await gateway.prepare(request.headers, body)
        if not call.request.stream:
            return Response(await gateway.chat(call), media_type=JSON)
        events = gateway.stream(call)
        return EventStream(await anext(events), events)

    async def passed(request: Request) -> Response:
        assert through is not None
        call = through.prepare(request.headers, await _body(request, limit))
        if not call.asked.stream:
            return await through.chat(call)
        answer = await through.open(call)
        if answer.status != 200:
            async with answer:
                refusal = b"".join([part async for part in answer.chunks()])
            return Response(refusal, answer.status, dict(answer.headers))
        events = through.stream(call, answer)
        return EventStream(await anext(events), events)

    async def models(request: Request) -> Response:
        gateway.identify(request.headers)
        model = {"id": gateway.options.policy, "object": "model", "created": 0, "owned_by": "millrace"}
        return _json({"object": "list", "data": [model]})

    async def health(request: Request) -> Response:
        log = gateway.recorder.log
        engines = {
            target.url: {"version": target.version, "running": target.running}
            for target in gateway.fleet.targets.values()
        }
        state = {"status": "ok", "sessions": len(gateway.sessions.live), "engines": engines}
        return _json({**state, "captured": log.end, "forwarded": log.acked, "waiting_bytes": log.waiting})

    async def start(request: Request) -> Response:
        base = f"{request.url.scheme}://{request.headers.get('host', request.url.netloc)}/v1"
        caller = gateway.identify(request.headers)
        return _json(await episodes.start(caller, await _body(request, limit), base))

    def on_session(work: Callable[[Any, bytes], Awaitable[dict[str, Any]]]) -> Handler:
        async def handler(request: Request) -> Response:
            session = episodes.find(gateway.identify(request.headers), request.path_params["id"])
            return _json(await work(session, await _body(request, limit)))

        return handler

    fast = _guarded(chat if through is None else passed)
    routes = Starlette(
        routes=[
            Route(CHAT, fast, methods=["POST"]),
            Route("/v1/models", _guarded(models), methods=["GET"]),
            Route("/health", _guarded(health), methods=["GET"]),
            Route("/v1/sessions", _guarded(start), methods=["POST"]),
            Route("/v1/sessions/{id}/reward", _guarded(on_session(episodes.reward)), methods=["POST"]),
            Route("/v1/sessions/{id}/events", _guarded(on_session(episodes.events)), methods=["POST"]),
            Route("/v1/sessions/{id}/end", _guarded(on_session(episodes.end)), methods=["POST"]),
        ],
        exception_handlers={HTTPException: _http_error},
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        # Straight to the hot route: matching and two middlewares would cost it a tenth of its time.
        if scope["type"] == "http" and scope["path"] == CHAT and scope["method"] == "POST":
            await (await fast(Request(scope, receive)))(scope, receive, send)
        else:
            await routes(scope, receive, send)

    return app


def _guarded(handler: Handler) -> Handler:
    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            return error.response()
        except Exception:
            logger.exception("%s %s failed", request.method, request.url.path)
            return ApiError(500, "The gateway failed: see its log", type="server_error", code="internal").response()

    return guarded


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()


async def _body(request: Request, limit: int) -> bytes:
    """The whole body. Raises ApiError 413 as soon as it is known to be too large."""
    too_large = ApiError(413, f"The request is larger than {limit} bytes", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type=JSON)
