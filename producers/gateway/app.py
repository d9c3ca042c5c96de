"""The gateway over HTTP: routes, and errors in the shape of the API that a route belongs to.

Invariants: every answer that is not a success is an error object of its API (OpenAI's where a route is of none),
whatever went wrong; who sends is known before the body is read; when a client goes away, its call is ended at once,
streamed or not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from millrace.dialects import all as dialects
from millrace.dialects.errors import ApiError
from millrace.infra.engines.upstream import TextUpstream
from millrace.producers.gateway.call_routes import CallRoutes
from millrace.producers.gateway.calls.gateway import Gateway
from millrace.producers.gateway.episodes.routes import EpisodeRoutes
from millrace.producers.gateway.http import azure_path, session_path
from millrace.producers.gateway.http.admission import Intake, check_origin
from millrace.producers.gateway.http.callers import Caller
from millrace.producers.gateway.http.handling import VISIT, guard_handler
from millrace.producers.gateway.http.listener import TRY_AGAIN
from millrace.producers.gateway.http.visit import Visit
from millrace.producers.gateway.processes.crossing import Crossing
from millrace.producers.gateway.socket import Sockets
from millrace.producers.gateway.upstreams import embeddings
from millrace.producers.gateway.upstreams.upstream_routes import UpstreamRoutes
from millrace.producers.gateway.upstreams.upstreams import Upstreams

logger = logging.getLogger(__name__)

GATEWAY_ROUTES = (
    (f"/v1{embeddings.PATH}", "POST", embeddings.NAME),
    ("/v1/models", "GET", "models"),
    ("/v1/models/{id:path}", "GET", "model"),
    ("/health", "GET", "health"),
    ("/v1/sessions", "POST", "start"),
    ("/v1/sessions", "GET", "sessions"),
    ("/v1/sessions/{id}/reward", "POST", "reward"),
    ("/v1/sessions/{id}/events", "POST", "events"),
    ("/v1/sessions/{id}/end", "POST", "end"),
    ("/v1/feedback", "POST", "feedback"),
)
"""path, method and name of the routes of no dialect"""


def routes() -> list[tuple[str, str, str]]:
    """Path, method and name of every route; docs/openapi.json describes them."""
    out = []
    for dialect in dialects.DIALECTS:
        out.append((dialect.path, "POST", dialect.name))
        out += [(dialect.path + one.below, one.method, one.name) for one in dialect.beside]
    return [*out, *GATEWAY_ROUTES]


def make_app(
    gateway: Gateway,
    upstream: TextUpstream | Upstreams | None = None,
    address: str = "",
    crossing: Crossing | None = None,
) -> ASGIApp:
    """The application, before engines, upstreams by the model, or one text-only upstream in place of the engines.
    Lifecycle is the caller's.

    `address` is what sessions are told to come back to: never what a request says of it. `crossing` leads to the other
    processes of the gateway, where there are any: it stands before this application, and is asked here for what comes
    over WebSockets."""
    intake = Intake(gateway.options) if crossing is None else crossing.intake
    keyless = not gateway.options.keys
    upstreams = upstream if upstream is None or isinstance(upstream, Upstreams) else Upstreams.one(upstream)
    ways = UpstreamRoutes(gateway, upstreams) if upstreams is not None else None
    calls, episodes = CallRoutes(gateway, ways), EpisodeRoutes(gateway, address)
    handlers = {**calls.handlers(), **episodes.handlers()}
    safe = {name: guard_handler(handler) for name, handler in handlers.items()}
    hot = {dialect.path: safe[dialect.name] for dialect in dialects.DIALECTS}
    starlette = Starlette(
        routes=[Route(path, safe[name], methods=[method]) for path, method, name in routes()],
        exception_handlers={HTTPException: _http_error},
    )
    starlette.router.redirect_slashes = False  # a redirect would lead to the request's own Host, before any key

    async def events(caller: Caller, headers: Headers, body: bytes) -> AsyncGenerator[bytes, None]:
        stream = partial(calls.events, caller)
        pieces = stream(headers, body) if crossing is None else crossing.events(stream, headers, body)
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    identify = gateway.callers.identify if crossing is None else crossing.caller
    sockets = Sockets(gateway, intake, dialects.RESPONSES, events, identify)

    async def socket(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            scope = plain_of(scope)
            if keyless:
                check_origin(Headers(scope=scope))
            if scope["path"] != dialects.RESPONSES.path:
                raise ApiError(404, f"{scope['path']} takes no WebSocket")
            await sockets.serve(scope, receive, send)
        except ApiError as error:
            logger.info("a WebSocket was refused: %s", error)
            await send({"type": "websocket.close", "code": TRY_AGAIN})

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await socket(scope, receive, send)
        if scope["type"] != "http":
            return await starlette(scope, receive, send)
        visit = Visit(intake, receive)
        try:
            scope = {**plain_of(scope), VISIT: visit}
            if keyless:
                check_origin(Headers(scope=scope))
            # Straight to the hot routes: matching and two middlewares would cost them a tenth of their time.
            if scope["method"] == "POST" and (handler := hot.get(scope["path"])) is not None:
                await (await handler(Request(scope, receive)))(scope, receive, send)
            else:
                await starlette(scope, receive, send)
        except ApiError as error:
            await visit.discard()
            await dialects.of_path(scope["path"]).refusal(error)(scope, receive, send)
        except (asyncio.CancelledError, OSError):
            if not visit.left:
                raise
            logger.info("a client went away before the end of its reply")
        finally:
            visit.close()

    return app


def plain_of(scope: Scope) -> Scope:
    """A request at the route that its path means. Raises ApiError 400."""
    return azure_path.to_v1(session_path.strip_name(scope))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    await request.scope[VISIT].discard()
    return dialects.of_path(path).refusal(ApiError(error.status_code, f"{request.method} {path}: {error.detail}"))
