"""The gateway over HTTP: routes, and errors in the shape of the API that a route belongs to.

Invariants: every answer that is not a success is an error object of its API (OpenAI's where a route is of none),
whatever went wrong; who sends is known before the body is read; when a client goes away, its call is ended at once,
streamed or not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from millrace.dialects import all as dialects
from millrace.dialects.base import Beside, Dialect, SideRequest
from millrace.dialects.errors import ApiError, bad_request
from millrace.infra.engines.upstream import TextUpstream
from millrace.infra.process.offload import aside
from millrace.producers.gateway.calls.gateway import Gateway
from millrace.producers.gateway.calls.policies import SERVED
from millrace.producers.gateway.episodes.service import Episodes
from millrace.producers.gateway.http import azure_path, session_path
from millrace.producers.gateway.http.admission import Intake, Visit, check_origin
from millrace.producers.gateway.http.callers import Caller
from millrace.producers.gateway.http.event_stream import EventStream
from millrace.producers.gateway.processes.crossing import Crossing
from millrace.producers.gateway.sessions.ownership import HELD, TOLD
from millrace.producers.gateway.socket import TRY_AGAIN, Sockets
from millrace.producers.gateway.upstreams import embeddings
from millrace.producers.gateway.upstreams.door import Door, gone
from millrace.producers.gateway.upstreams.routes import fits
from millrace.producers.gateway.upstreams.upstreams import Upstreams
from millrace.schemas.labels import make_label

logger = logging.getLogger(__name__)

JSON = "application/json"
OWN = (
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
VISIT = "millrace.visit"
Handler = Callable[[Request], Awaitable[Response]]


def routes() -> list[tuple[str, str, str]]:
    """Path, method and name of every route; docs/openapi.json describes them."""
    out = []
    for dialect in dialects.DIALECTS:
        out.append((dialect.path, "POST", dialect.name))
        out += [(dialect.path + one.below, one.method, one.name) for one in dialect.beside]
    return [*out, *OWN]


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
    episodes = Episodes(gateway)
    intake = Intake(gateway.options) if crossing is None else crossing.intake
    keyless = not gateway.options.keys
    upstreams = upstream if upstream is None or isinstance(upstream, Upstreams) else Upstreams.one(upstream)
    door = Door(gateway, upstreams) if upstreams is not None else None

    def enter(request: Request) -> tuple[Visit, Caller]:
        visit: Visit = request.scope[VISIT]
        return visit, visit.enter(gateway.callers.identify(request.headers))

    async def body_of(visit: Visit, request: Request) -> bytes:
        """The body, for the model that the path names where it does."""
        body, name = await visit.body(request), request.scope.get(azure_path.DEPLOYMENT)
        return body if name is None else await aside(len(body), azure_path.deployed, body, name)

    def spoken(dialect: Dialect) -> Handler:
        async def handler(request: Request) -> Response:
            gateway.check_open()
            visit, caller = enter(request)
            body = await body_of(visit, request)
            visit.watch()
            if door is not None and (routed := await door.routed(dialect, body)) is not None:
                return await door.answer(caller, request, body, routed, partial(_refusal, request))
            call = await gateway.prepare(caller, request.headers, body, dialect)
            if not call.request.stream:
                response = Response(await gateway.chat(call), media_type=JSON)
            else:
                keep_alive_s = gateway.options.keep_alive_s
                response = EventStream(gateway.stream(call), partial(_refusal, request), keep_alive_s, dialect)
            response.headers[TOLD] = call.session.id
            return response

        return handler

    def beside(dialect: Dialect, route: Beside) -> Handler:
        async def handler(request: Request) -> Response:
            gateway.check_open()
            visit, caller = enter(request)
            body = await visit.body(request)
            if route.method == "POST" and door is not None and (routed := await door.routed(dialect, body)) is not None:
                return await door.uncaptured(caller, request, body, routed, route.below)
            id, query = request.path_params.get("id", ""), dict(request.query_params)
            recall = partial(gateway.recall, caller, request.headers)
            asking = SideRequest(recall, gateway.count, gateway.delete, id, body, query)
            if id and (upstream := dialect.away(asking)) is not None:
                if door is None:
                    raise gone(id, upstream)
                visit.watch()
                return await door.kept(request, dialect, upstream, id, route)
            return Response(await route.answer(asking), media_type=JSON)

        return handler

    async def embedded(request: Request) -> Response:
        gateway.check_open()
        visit, caller = enter(request)
        body = await body_of(visit, request)
        if door is None:
            raise embeddings.unserved()
        visit.watch()
        return await door.embeddings(caller, request, body)

    def listed() -> dict[str, str]:
        """Who answers each model that has a name of its own."""
        owned = {gateway.options.policy: "millrace"}
        for policy, served in gateway.engines.served.items():
            versions = [make_label(policy, version) for version in sorted(served.fleet.versions)]
            owned |= dict.fromkeys((policy, *versions), "millrace")
        for name in upstreams.models if upstreams is not None else ():
            owned.setdefault(name, "upstream")
        return owned

    async def models(request: Request) -> Response:
        enter(request)
        return _json({"object": "list", "data": [_model(id, owner) for id, owner in listed().items()]})

    async def model(request: Request) -> Response:
        enter(request)
        id = request.path_params["id"]
        owner = listed().get(id)
        if owner is None and upstreams is not None and any(fits(rule.model, id) for rule in upstreams.rules):
            owner = "upstream"
        if owner is None:
            raise ApiError(404, f"The model {id!r} does not exist", param="model", code="model_not_found")
        return _json(_model(id, owner))

    async def health(request: Request) -> Response:
        gateway.check_open()
        # No error: a load balancer would turn away rewards and ends of episodes too.
        recorder = gateway.recorder
        down = await recorder.down() if recorder.required else None
        policies = gateway.engines.standing()
        status = "capture down" if down is not None else overall(policies)
        try:
            enter(request)
        except ApiError:
            return _json({"status": status})  # a load balancer has no key; what is behind is not its business
        log = recorder.log
        engines = {
            target.url: {"version": target.version, "running": target.running}
            for served in gateway.engines.served.values()
            for target in served.fleet.targets.values()
        }
        sessions = gateway.sessions
        state = {
            "status": status,
            "policies": policies,
            "sessions": len(sessions.live),
            "unreadable": len(sessions.unreadable),
        }
        return _json(
            {
                **state,
                "engines": engines,
                "capture": "required" if recorder.required else "best-effort",
                "lost": recorder.lost,
                "captured": log.end,
                "forwarded": log.acked,
                "waiting_bytes": log.waiting,
            }
        )

    async def start(request: Request) -> Response:
        gateway.check_open()
        visit, caller = enter(request)
        body, held = await visit.body(request), HELD in request.headers
        return _json(await episodes.start(caller, body, f"{address}/v1", held=held))

    async def sessions(request: Request) -> Response:
        _, caller = enter(request)
        return _json({"sessions": episodes.of_name(caller, request.query_params.get("name"))})

    async def reward(request: Request) -> Response:
        visit, caller = enter(request)
        session = episodes.judged(caller, request.path_params["id"], request.headers)
        return _json(await episodes.reward(caller, session, await visit.body(request)))

    async def feedback(request: Request) -> Response:
        visit, caller = enter(request)
        return _json(await episodes.feedback(caller, await visit.body(request)))

    def on_session(work: Callable[[Any, bytes], Awaitable[dict[str, Any]]]) -> Handler:
        async def handler(request: Request) -> Response:
            visit, caller = enter(request)
            session = episodes.own(caller, request.path_params["id"])
            return _json(await work(session, await visit.body(request)))

        return handler

    handlers = {
        **{dialect.name: spoken(dialect) for dialect in dialects.DIALECTS},
        **{one.name: beside(dialect, one) for dialect in dialects.DIALECTS for one in dialect.beside},
        embeddings.NAME: embedded,
        "models": models,
        "model": model,
        "health": health,
        "start": start,
        "sessions": sessions,
        "reward": reward,
        "feedback": feedback,
        "events": on_session(episodes.events),
        "end": on_session(episodes.end),
    }
    guarded = {name: _guarded(handler) for name, handler in handlers.items()}
    hot = {dialect.path: guarded[dialect.name] for dialect in dialects.DIALECTS}
    routed = Starlette(
        routes=[Route(path, guarded[name], methods=[method]) for path, method, name in routes()],
        exception_handlers={HTTPException: _http_error},
    )
    routed.router.redirect_slashes = False  # a redirect would lead to the request's own Host, before any key

    async def answered(caller: Caller, headers: Headers, body: bytes) -> AsyncGenerator[bytes, None]:
        if door is not None and await door.routed(dialects.RESPONSES, body) is not None:
            raise bad_request("model: an upstream answers it, which is asked over HTTP", param="model")
        async with aclosing(gateway.stream(await gateway.prepare(caller, headers, body, dialects.RESPONSES))) as told:
            async for together in told:
                yield together

    async def events(caller: Caller, headers: Headers, body: bytes) -> AsyncGenerator[bytes, None]:
        stream = partial(answered, caller)
        told = stream(headers, body) if crossing is None else crossing.events(stream, headers, body)
        async with aclosing(told):
            async for together in told:
                yield together

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
            return await routed(scope, receive, send)
        visit = Visit(intake, receive)
        try:
            scope = {**plain_of(scope), VISIT: visit}
            if keyless:
                check_origin(Headers(scope=scope))
            # Straight to the hot routes: matching and two middlewares would cost them a tenth of their time.
            if scope["method"] == "POST" and (handler := hot.get(scope["path"])) is not None:
                await (await handler(Request(scope, receive)))(scope, receive, send)
            else:
                await routed(scope, receive, send)
        except ApiError as error:
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
    return azure_path.plain(session_path.plain(scope))


def overall(policies: Mapping[str, str]) -> str:
    """How a gateway stands whose policies stand so: by name, see `Gateway.standing`."""
    served = [standing == SERVED for standing in policies.values()]
    return "ok" if all(served) else "partial" if any(served) else "no engine"


def _guarded(handler: Handler) -> Handler:
    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except BaseException as error:
            return _refusal(request, error)

    return guarded


def _refusal(request: Request, error: BaseException) -> Response:
    """The answer to a request that failed before its response began. Raises what nobody waits for an answer to."""
    if not isinstance(error, ApiError):
        error = _unforeseen(request, error)
    return dialects.of_path(request.url.path).refusal(error)


def _unforeseen(request: Request, error: BaseException) -> ApiError:
    if isinstance(error, asyncio.CancelledError) and not request.scope[VISIT].left:
        said = "This call was cut off: its session has ended, or the gateway stops"
        return ApiError(503, said, type="server_error", code="cut_off")
    if not isinstance(error, Exception):
        raise error
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ApiError(500, "The gateway failed: see its log", type="server_error", code="internal")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    return dialects.of_path(path).refusal(ApiError(error.status_code, f"{request.method} {path}: {error.detail}"))


def _model(id: str, owner: str) -> dict[str, Any]:
    return {"id": id, "object": "model", "created": 0, "owned_by": owner}


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type=JSON)
