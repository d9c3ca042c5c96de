"""The routes of calls of models, whoever answers them, and of what APIs have beside them.

Invariant: a stream that is open is closed and recorded, also where its response cannot be made."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from millrace.dialects import all as dialects
from millrace.dialects.base import Dialect, SideRequest, SideRoute
from millrace.dialects.errors import ApiError, bad_request
from millrace.producers.gateway.calls.call import Call, WholeReply
from millrace.producers.gateway.calls.engine_calls import EngineCalls
from millrace.producers.gateway.calls.gateway import Gateway
from millrace.producers.gateway.calls.pipeline import CallPipeline
from millrace.producers.gateway.http.callers import Caller
from millrace.producers.gateway.http.event_stream import EventStream
from millrace.producers.gateway.http.handling import JSON, Handler, body_of, enter, json_of, refusal
from millrace.producers.gateway.sessions.ownership import TRAJECTORY_HEADER
from millrace.producers.gateway.upstreams import embeddings
from millrace.producers.gateway.upstreams.routes import fits
from millrace.producers.gateway.upstreams.upstream_routes import UpstreamRoutes, no_keeper
from millrace.schemas.labels import make_label


class CallRoutes:
    """Those of one gateway. `upstreams`: the way to who answers in place of its engines, or beside them."""

    def __init__(self, gateway: Gateway, upstreams: UpstreamRoutes | None) -> None:
        self.gateway = gateway
        self.upstreams = upstreams
        self.engines = EngineCalls(gateway)
        self.pipeline = CallPipeline(gateway)

    def handlers(self) -> dict[str, Handler]:
        """By the name of the route."""
        return {
            **{dialect.name: partial(self._call, dialect) for dialect in dialects.DIALECTS},
            **{one.name: partial(self._side, dialect, one) for dialect in dialects.DIALECTS for one in dialect.beside},
            embeddings.NAME: self._embeddings,
            "models": self._models,
            "model": self._model,
        }

    async def events(self, caller: Caller, headers: Headers, body: bytes) -> AsyncGenerator[bytes, None]:
        """The events of a call over a socket. Raises ApiError before the first of them only."""
        if self.upstreams is not None and await self.upstreams.route_request(dialects.RESPONSES, body) is not None:
            raise bad_request("model: an upstream answers it, which is asked over HTTP", param="model")
        call = await self.engines.prepare(caller, headers, body, dialects.RESPONSES)
        async with aclosing(self.pipeline.stream(call)) as pieces:
            async for piece in pieces:
                yield piece

    async def _call(self, dialect: Dialect, request: Request) -> Response:
        self.gateway.check_open()
        visit, caller = enter(request, self.gateway.callers)
        body = await body_of(visit, request)
        visit.watch()
        call: Call
        if (
            self.upstreams is not None
            and (upstream_request := await self.upstreams.route_request(dialect, body)) is not None
        ):
            call = await self.upstreams.prepare(caller, request.headers, body, upstream_request, request.url.query)
        else:
            call = await self.engines.prepare(caller, request.headers, body, dialect)
        if not call.streams:
            response = _response(await self.pipeline.answer(call))
        elif (refusal_reply := await self.pipeline.open(call)) is not None:
            return _response(refusal_reply)
        else:
            try:
                response = self._stream(call, request)
            except BaseException:
                self.pipeline.leave(call)
                raise
        response.headers[TRAJECTORY_HEADER] = call.session.id
        return response

    def _stream(self, call: Call, request: Request) -> Response:
        head = call.stream_head()
        # No comments of ours: an upstream's bytes go on as they are.
        keep_alive_s = self.gateway.options.keep_alive_s if head is None else 0.0
        response = EventStream(self.pipeline.stream(call), partial(refusal, request), keep_alive_s, call.dialect)
        if head is not None:
            response.status_code = head.status
            response.headers.update(head.headers or {})
        return response

    async def _side(self, dialect: Dialect, route: SideRoute, request: Request) -> Response:
        gateway, upstreams = self.gateway, self.upstreams
        gateway.check_open()
        visit, caller = enter(request, gateway.callers)
        body = await visit.body(request)
        if route.method == "POST" and upstreams is not None:
            upstream_request = await upstreams.route_request(dialect, body)
            if upstream_request is not None:
                return await upstreams.pass_on(caller, request, body, upstream_request, route.below)
        id, query = request.path_params.get("id", ""), dict(request.query_params)
        recall = partial(gateway.matching.recall, caller, request.headers)
        asking = SideRequest(recall, self.engines.count, gateway.delete, id, body, query)
        if id and (upstream := dialect.keeper(asking)) is not None:
            if upstreams is None:
                raise no_keeper(id, upstream)
            visit.watch()
            return await upstreams.ask_keeper(request, dialect, upstream, id, route)
        return Response(await route.answer(asking), media_type=JSON)

    async def _embeddings(self, request: Request) -> Response:
        self.gateway.check_open()
        visit, caller = enter(request, self.gateway.callers)
        body = await body_of(visit, request)
        if self.upstreams is None:
            raise embeddings.refusal()
        visit.watch()
        return await self.upstreams.embeddings(caller, request, body)

    def _owners(self) -> dict[str, str]:
        """Who answers each model that has a name of its own."""
        gateway = self.gateway
        owners = {gateway.options.policy: "millrace"}
        for policy, served_policy in gateway.engines.served.items():
            versions = [make_label(policy, version) for version in sorted(served_policy.fleet.versions)]
            owners |= dict.fromkeys((policy, *versions), "millrace")
        for name in self.upstreams.upstreams.models if self.upstreams is not None else ():
            owners.setdefault(name, "upstream")
        return owners

    async def _models(self, request: Request) -> Response:
        enter(request, self.gateway.callers, "read")
        return json_of({"object": "list", "data": [_model(id, owner) for id, owner in self._owners().items()]})

    async def _model(self, request: Request) -> Response:
        enter(request, self.gateway.callers, "read")
        id = request.path_params["id"]
        owner = self._owners().get(id)
        rules = self.upstreams.upstreams.rules if self.upstreams is not None else []
        if owner is None and any(fits(rule.model, id) for rule in rules):
            owner = "upstream"
        if owner is None:
            raise ApiError(404, f"The model {id!r} does not exist", param="model", code="model_not_found")
        return json_of(_model(id, owner))


def _model(id: str, owner: str) -> dict[str, object]:
    return {"id": id, "object": "model", "created": 0, "owned_by": owner}


def _response(reply: WholeReply) -> Response:
    if reply.headers is None:
        return Response(reply.body, reply.status, media_type=JSON)
    return Response(reply.body, reply.status, dict(reply.headers))
