"""What of a gateway's HTTP goes to upstreams: which requests, and how their answers go back."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from millrace.infra.engines.upstream import UpstreamReply
from millrace.infra.errors import EngineError
from millrace.producers.gateway.aside import aside
from millrace.producers.gateway.callers import Caller
from millrace.producers.gateway.errors import ApiError, of_engine
from millrace.producers.gateway.event_stream import EventStream
from millrace.producers.gateway.gateway import Gateway
from millrace.producers.gateway.protocols.all import reader
from millrace.producers.gateway.protocols.base import Dialect
from millrace.producers.gateway.protocols.head import Head, read_head, renamed
from millrace.producers.gateway.protocols.reader import Reader
from millrace.producers.gateway.upstreams.passthrough import Passthrough, asked_with
from millrace.producers.gateway.upstreams.routes import Rule
from millrace.producers.gateway.upstreams.upstreams import Upstreams
from millrace.producers.gateway.whose import hints

Refusal = Callable[[BaseException], Response]


class Routed(NamedTuple):
    """A request for an upstream."""

    rule: Rule
    head: Head
    reader: Reader


class Door:
    """The way from `gateway` to `upstreams`."""

    def __init__(self, gateway: Gateway, upstreams: Upstreams) -> None:
        self._policies = gateway.served or (gateway.options.policy,)
        self._upstreams = upstreams
        self._through = Passthrough(gateway, upstreams)

    async def routed(self, dialect: Dialect, body: bytes) -> Routed | None:
        """Where a request goes; None: to the engines. Raises ApiError 400 for what is no request for an upstream, and
        404 for a model that nobody answers in this API."""
        head: Head | None = None
        unread: ApiError | None = None
        try:
            head = await aside(len(body), read_head, body)
        except ApiError as error:
            unread = error
        rule = self._upstreams.route(self._policies, head.name if head is not None else "", dialect.name)
        if rule is None:
            return None
        if head is None:
            assert unread is not None
            raise unread
        return Routed(rule, head, reader(dialect))

    async def answer(self, caller: Caller, request: Request, body: bytes, routed: Routed, refusal: Refusal) -> Response:
        """The upstream's answer to a call, captured. `refusal` answers what fails before a stream began."""
        rule, head, reader = routed
        call = await self._through.prepare(caller, request.headers, body, head, rule, reader, request.url.query)
        if head.stream is not True:
            return await self._through.answer(call)
        answer = await self._through.open(call)
        if isinstance(answer, UpstreamReply):
            return Response(answer.body, answer.status, dict(answer.headers))
        try:
            # No comments of ours: an upstream's bytes go on as they are.
            response = EventStream(self._through.stream(call, answer), refusal, dialect=reader.dialect)
            response.status_code = answer.status
            response.headers.update(answer.headers)
        except BaseException:
            await self._through.left(call, answer)
            raise
        return response

    async def uncaptured(self, caller: Caller, request: Request, body: bytes, routed: Routed, below: str) -> Response:
        """The upstream's answer to what is no call of a model, at a path below that of calls. Raises ApiError."""
        rule, _, reader = routed
        upstream = self._upstreams.chain(rule, reader.dialect.name)[0]
        path = f"{reader.path}{below}" + (f"?{request.url.query}" if request.url.query else "")
        sent = await aside(len(body), renamed, body, rule.send_as) if rule.send_as else body
        headers = asked_with(request.headers, caller.tenant, hints(request.headers).subject)
        try:
            answer = await upstream.client.ask(path, sent, headers)
        except EngineError as error:
            raise of_engine(error) from error
        return Response(answer.body, answer.status, dict(answer.headers))
