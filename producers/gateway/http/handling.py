"""What every route of the gateway has in common: who sends, admission, errors, JSON.

Invariants: who sends is known before the body is read; every answer that is not a success is an error object of the
API that its path belongs to, whatever went wrong."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import orjson
from starlette.requests import Request
from starlette.responses import Response

from millrace.dialects import all as dialects
from millrace.dialects.errors import ApiError
from millrace.infra.process.offload import run_aside
from millrace.producers.gateway.http import azure_path
from millrace.producers.gateway.http.callers import Act, Caller, Callers
from millrace.producers.gateway.http.visit import Visit

logger = logging.getLogger(__name__)

JSON = "application/json"
VISIT = "millrace.visit"
Handler = Callable[[Request], Awaitable[Response]]


def enter(request: Request, callers: Callers, act: Act = "call") -> tuple[Visit, Caller]:
    """The visit of a request for this act, and who sends it. Raises ApiError."""
    visit: Visit = request.scope[VISIT]
    caller = visit.enter(callers.identify(request.headers))
    caller.check_may(act)
    return visit, caller


async def body_of(visit: Visit, request: Request) -> bytes:
    """The body, for the model that the path names where it does."""
    body, name = await visit.body(request), request.scope.get(azure_path.DEPLOYMENT)
    return body if name is None else await run_aside(len(body), azure_path.name_model, body, name)


def json_of(content: object) -> Response:
    """A response of JSON."""
    return Response(orjson.dumps(content), media_type=JSON)


def guard_handler(handler: Handler) -> Handler:
    """A handler whose failures are answers."""

    async def guard(request: Request) -> Response:
        try:
            return await handler(request)
        except BaseException as error:
            answer = refusal(request, error)
            await request.scope[VISIT].discard()
            return answer

    return guard


def refusal(request: Request, error: BaseException) -> Response:
    """The answer to a request that failed before its response began. Raises what nobody waits for an answer to."""
    if not isinstance(error, ApiError):
        error = _to_api_error(request, error)
    return dialects.of_path(request.url.path).refusal(error)


def _to_api_error(request: Request, error: BaseException) -> ApiError:
    if isinstance(error, asyncio.CancelledError) and not request.scope[VISIT].left:
        message = "This call was cut off: its session has ended, or the gateway stops"
        return ApiError(503, message, type="server_error", code="cut_off")
    if not isinstance(error, Exception):
        raise error
    id = request.headers.get("x-request-id", "")
    logger.error("%s %s failed (x-request-id: %s)", request.method, request.url.path, id, exc_info=error)
    return ApiError(500, "The gateway failed: see its log", type="server_error", code="internal")
