"""What of a gateway's HTTP goes to upstreams: which requests, and how their answers go back.

Invariant: every request is tried again and sent to fallbacks by the same rules, whether it is captured or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from millrace.dialects.all import reader
from millrace.dialects.base import Beside, Dialect
from millrace.dialects.errors import ApiError, of_engine
from millrace.dialects.reading.head import RequestHead, read_head, renamed
from millrace.dialects.reading.reader import DialectReader
from millrace.infra.engines.upstream import UpstreamReply, succeeded
from millrace.infra.errors import EngineError, EngineTimeout, EngineUnavailable
from millrace.infra.process.offload import aside
from millrace.producers.gateway.calls.gateway import Gateway
from millrace.producers.gateway.http.callers import Caller
from millrace.producers.gateway.http.event_stream import EventStream
from millrace.producers.gateway.sessions.ownership import TOLD, hints
from millrace.producers.gateway.spending import borne, spent
from millrace.producers.gateway.upstreams import embeddings
from millrace.producers.gateway.upstreams.passthrough import ASKED_WITH, Passthrough, asked_with
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.sending import first_answer
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams
from millrace.schemas.ids import new_id, now_micros

Refusal = Callable[[BaseException], Response]


class Routed(NamedTuple):
    """A request for an upstream."""

    rule: RouteRule
    head: RequestHead
    reader: DialectReader
    dialect: Dialect


class Door:
    """The way from `gateway` to `upstreams`."""

    def __init__(self, gateway: Gateway, upstreams: Upstreams) -> None:
        self._gateway = gateway
        self._upstreams = upstreams
        self._through = Passthrough(gateway, upstreams)

    async def routed(self, dialect: Dialect, body: bytes) -> Routed | None:
        """Where a request goes; None: to the engines. Raises ApiError 400 for what is no request for an upstream, and
        404 for a model that nobody answers in this API."""
        found = await self._fitting(dialect.name, body)
        return None if found is None else Routed(*found, reader(dialect), dialect)

    async def _fitting(self, api: str, body: bytes) -> tuple[RouteRule, RequestHead] | None:
        head: RequestHead | None = None
        unread: ApiError | None = None
        try:
            head = await aside(len(body), read_head, body)
        except ApiError as error:
            unread = error
        rule = self._upstreams.route(self._gateway.policies, head.name if head is not None else "", api)
        if rule is None:
            return None
        if head is None:
            assert unread is not None
            raise unread
        return rule, head

    async def answer(self, caller: Caller, request: Request, body: bytes, routed: Routed, refusal: Refusal) -> Response:
        """The upstream's answer to a call, captured. `refusal` answers what fails before a stream began."""
        rule, head, reader, dialect = routed
        call = await self._through.prepare(
            caller, request.headers, body, head, rule, reader, dialect, request.url.query
        )
        if head.stream is not True:
            whole = await self._through.answer(call)
            whole.headers[TOLD] = call.session.id
            return whole
        answer = await self._through.open(call)
        if isinstance(answer, UpstreamReply):
            return _response(answer)
        try:
            # No comments of ours: an upstream's bytes go on as they are.
            response = EventStream(self._through.stream(call, answer), refusal, dialect=dialect)
            response.status_code = answer.status
            response.headers.update({**answer.headers, TOLD: call.session.id})
        except BaseException:
            await self._through.left(call, answer)
            raise
        return response

    async def uncaptured(self, caller: Caller, request: Request, body: bytes, routed: Routed, below: str) -> Response:
        """The upstream's answer to what is no call of a model, at a path below that of calls. Raises ApiError."""
        rule, _, reader, dialect = routed
        api, path = dialect.name, f"{reader.path}{below}"
        return _response(await self._passed(caller, request, body, rule, api, path))

    async def kept(self, request: Request, dialect: Dialect, upstream: str, id: str, route: Beside) -> Response:
        """What an upstream answers about a response that it keeps. One that it deleted, or has no more, can be
        named no more here either. Raises ApiError, 404 where there is no such upstream any more."""
        found = self._upstreams.of_name(upstream)
        if found is None:
            raise gone(id, upstream)
        path = reader(dialect).path + route.below.format(id=quote(id, safe=""))
        path = f"{path}?{request.url.query}" if request.url.query else path
        headers = {name: request.headers[name] for name in ASKED_WITH if name in request.headers}

        async def to(upstream: Upstream) -> UpstreamReply:
            more = upstream.headers_of(request.headers)
            return await upstream.client.send(route.method, path, {**headers, **more})

        try:
            answer = await first_answer([found], to, id, self._upstreams.first_s)
        except EngineError as error:
            raise of_engine(error) from error
        if route.method == "DELETE" and (succeeded(answer.status) or answer.status == 404):
            await self._gateway.delete(id)
        return _response(answer)

    async def embeddings(self, caller: Caller, request: Request, body: bytes) -> Response:
        """The upstream's answer to a request of embeddings, which counts for the caller's key and is not captured.
        Raises ApiError, 404 for a model of the engines."""
        found = await self._fitting(embeddings.NAME, body)
        if found is None:
            raise embeddings.unserved()
        rule, head = found
        self._gateway.check_spends(caller)
        users, broken = (head.user, head.safety_identifier), list[int]()
        try:
            answer = await self._passed(caller, request, body, rule, embeddings.NAME, embeddings.PATH, users, broken)
        except asyncio.CancelledError:  # its client went away, and the upstream charges all the same
            self._spend(caller, rule, body, embeddings.usage(b""))
            raise
        finally:
            for _ in broken:  # made at least in part, whatever another attempt came to
                self._spend(caller, rule, body, embeddings.usage(b""))
        if succeeded(answer.status):
            usage = await aside(len(answer.body), embeddings.usage, answer.body)
            self._spend(caller, rule, body, usage)
        return _response(answer)

    def _spend(self, caller: Caller, rule: RouteRule, body: bytes, usage: tuple[int, int, int]) -> None:
        what = spent(rule.prices, borne(usage, len(body), 0))
        self._gateway.recorder.spending.add(caller.key, what, now_micros())

    async def _passed(
        self,
        caller: Caller,
        request: Request,
        body: bytes,
        rule: RouteRule,
        api: str,
        path: str,
        users: Sequence[Any] = (),
        broken: list[int] | None = None,
    ) -> UpstreamReply:
        """The upstream's answer to a request that is not captured; its session is not silent meanwhile. `broken` gets
        the bytes of each answer that broke off. Raises ApiError."""
        path = f"{path}?{request.url.query}" if request.url.query else path
        sent = await aside(len(body), renamed, body, rule.send_as) if rule.send_as else body
        said = hints(request.headers, *users)
        headers = asked_with(request.headers, caller.tenant, said.subject)
        session = caller.session or (self._gateway.sessions.named(caller.tenant, said) if said.name else None)

        async def to(upstream: Upstream) -> UpstreamReply:
            try:
                return await upstream.client.ask(path, sent, {**headers, **upstream.headers_of(request.headers)})
            except (EngineUnavailable, EngineTimeout) as error:
                if broken is not None and error.received:
                    broken.append(error.received)
                raise

        chain = self._upstreams.chain_of(rule, api)
        try:
            with self._gateway.calling(session, new_id()) if session is not None else nullcontext():
                return await first_answer(chain, to, caller.key or caller.tenant, self._upstreams.first_s)
        except EngineError as error:
            raise of_engine(error) from error


def gone(id: str, upstream: str) -> ApiError:
    """The refusal of what an upstream keeps that there is no more."""
    said = f"Response with id '{id}' not found: upstream {upstream!r}, which keeps it, is not in the settings any more."
    return ApiError(404, said)


def _response(answer: UpstreamReply) -> Response:
    return Response(answer.body, answer.status, dict(answer.headers))
