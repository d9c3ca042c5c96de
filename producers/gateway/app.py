"""The gateway over HTTP: routes, and errors in OpenAI's shape.

Invariants: every answer that is not a success is an OpenAI error object, whatever went wrong; who sends is known before
the body is read; when a client goes away, its call is ended at once, streamed or not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from millrace.infra.engines.upstream import TextUpstream
from millrace.producers.gateway.episodes import Episodes
from millrace.producers.gateway.errors import ApiError
from millrace.producers.gateway.gateway import Caller, Gateway
from millrace.producers.gateway.intake import Intake, Visit, check_origin
from millrace.producers.gateway.passthrough import Passthrough

logger = logging.getLogger(__name__)

JSON = "application/json"
CHAT = "/v1/chat/completions"
VISIT = "millrace.visit"
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
        # Closed also when this task is cancelled: what was sampled is recorded before anyone goes on.
        async with aclosing(self._rest):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for event in self._rest:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def make_app(gateway: Gateway, upstream: TextUpstream | None = None, address: str = "") -> ASGIApp:
    """The application, before engines or before one text-only upstream. Lifecycle is the caller's.

    `address` is what sessions are told to come back to: never what a request says of it."""
    episodes = Episodes(gateway)
    intake = Intake(gateway.options)
    keyless = not gateway.options.keys
    through = Passthrough(gateway, upstream) if upstream is not None else None

    def enter(request: Request) -> tuple[Visit, Caller]:
        visit: Visit = request.scope[VISIT]
        return visit, visit.enter(gateway.identify(request.headers))

    async def chat(request: Request) -> Response:
        gateway.check_open()
        visit, caller = enter(request)
        body = await visit.body(request)
        visit.watch()
        call = await gateway.prepare(caller, request.headers, body)
        if not call.request.stream:
            return Response(await gateway.chat(call), media_type=JSON)
        events = gateway.stream(call)
        return EventStream(await anext(events), events)

    async def passed(request: Request) -> Response:
        gateway.check_open()
        assert through is not None
        visit, caller = enter(request)
        body = await visit.body(request)
        visit.watch()
        call = await through.prepare(caller, request.headers, body)
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
        enter(request)
        model = {"id": gateway.options.policy, "object": "model", "created": 0, "owned_by": "millrace"}
        return _json({"object": "list", "data": [model]})

    async def health(request: Request) -> Response:
        gateway.check_open()
        # No error: a load balancer would turn away rewards and ends of episodes too.
        status = "no engine" if through is None and gateway.fleet.away else "ok"
        try:
            enter(request)
        except ApiError:
            return _json({"status": status})  # a load balancer has no key; what is behind is not its business
        log = gateway.recorder.log
        engines = {
            target.url: {"version": target.version, "running": target.running}
            for target in gateway.fleet.targets.values()
        }
        sessions = gateway.sessions
        state = {"status": status, "sessions": len(sessions.live), "unreadable": len(sessions.unreadable)}
        return _json(
            {**state, "engines": engines, "captured": log.end, "forwarded": log.acked, "waiting_bytes": log.waiting}
        )

    async def start(request: Request) -> Response:
        gateway.check_open()
        visit, caller = enter(request)
        return _json(await episodes.start(caller, await visit.body(request), f"{address}/v1"))

    async def reward(request: Request) -> Response:
        visit, caller = enter(request)
        session = episodes.find(caller, request.path_params["id"])
        return _json(await episodes.reward(caller, session, await visit.body(request)))

    def on_session(work: Callable[[Any, bytes], Awaitable[dict[str, Any]]]) -> Handler:
        async def handler(request: Request) -> Response:
            visit, caller = enter(request)
            session = episodes.own(caller, request.path_params["id"])
            return _json(await work(session, await visit.body(request)))

        return handler

    fast = _guarded(chat if through is None else passed)
    routes = Starlette(
        routes=[
            Route(CHAT, fast, methods=["POST"]),
            Route("/v1/models", _guarded(models), methods=["GET"]),
            Route("/health", _guarded(health), methods=["GET"]),
            Route("/v1/sessions", _guarded(start), methods=["POST"]),
            Route("/v1/sessions/{id}/reward", _guarded(reward), methods=["POST"]),
            Route("/v1/sessions/{id}/events", _guarded(on_session(episodes.events)), methods=["POST"]),
            Route("/v1/sessions/{id}/end", _guarded(on_session(episodes.end)), methods=["POST"]),
        ],
        exception_handlers={HTTPException: _http_error},
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await routes(scope, receive, send)
        visit = scope[VISIT] = Visit(intake, receive)
        try:
            if keyless:
                check_origin(Headers(scope=scope))
            # Straight to the hot route: matching and two middlewares would cost it a tenth of its time.
            if scope["path"] == CHAT and scope["method"] == "POST":
                await (await fast(Request(scope, receive)))(scope, receive, send)
            else:
                await routes(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except (asyncio.CancelledError, OSError):
            if not visit.left:
                raise
            logger.info("a client went away before the end of its reply")
        finally:
            visit.close()

    return app


def _guarded(handler: Handler) -> Handler:
    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            return error.response()
        except asyncio.CancelledError:
            if request.scope[VISIT].left:
                raise
            said = "This call was cut off: its session has ended, or the gateway stops"
            return ApiError(503, said, type="server_error", code="cut_off").response()
        except Exception:
            logger.exception("%s %s failed", request.method, request.url.path)
            return ApiError(500, "The gateway failed: see its log", type="server_error", code="internal").response()

    return guarded


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type=JSON)
