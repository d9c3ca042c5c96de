"""What of a gateway's HTTP goes to upstreams: which requests, and how their answers go back.

Invariants: every request is tried again and sent to fallbacks by the same rules, whether it is captured or not; the
caller's key is never passed on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from hashlib import blake2b
from typing import NamedTuple
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from millrace.dialects import match_keys
from millrace.dialects.all import reader
from millrace.dialects.base import Dialect, SideRoute
from millrace.dialects.errors import ApiError, of_engine
from millrace.dialects.reading.head import RequestHead, read_head, rename_model
from millrace.dialects.reading.reader import DialectReader, ReadRequest
from millrace.infra.engines.upstream import UpstreamReply, is_success
from millrace.infra.errors import EngineError, EngineTimeout, EngineUnavailable
from millrace.infra.process.offload import run_aside
from millrace.producers.gateway.calls.gateway import CallInSession, Gateway
from millrace.producers.gateway.http.callers import Caller
from millrace.producers.gateway.sessions.ownership import hints
from millrace.producers.gateway.spending import bill_usage, expense_of
from millrace.producers.gateway.upstreams import embeddings
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.sending import first_answer
from millrace.producers.gateway.upstreams.upstream_call import UpstreamCall
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams
from millrace.schemas.ids import new_id, now_micros
from millrace.schemas.requests import RequestOutline, outline_request

FORWARDED_HEADERS = ("anthropic-version", "anthropic-beta", "openai-beta")
"""headers of a request that say how it is meant, and go on"""
ONCE = "idempotency-key"


class UpstreamRequest(NamedTuple):
    """A request for an upstream."""

    rule: RouteRule
    head: RequestHead
    reader: DialectReader
    dialect: Dialect


class UpstreamRoutes:
    """The way from `gateway` to `upstreams`."""

    def __init__(self, gateway: Gateway, upstreams: Upstreams) -> None:
        self._gateway = gateway
        self.upstreams = upstreams

    async def route_request(self, dialect: Dialect, body: bytes) -> UpstreamRequest | None:
        """Where a request goes; None: to the engines. Raises ApiError 400 for what is no JSON object, and 404 for a
        model that nobody answers in this API."""
        match = await self._fitting(dialect.name, body)
        return None if match is None else UpstreamRequest(*match, reader(dialect), dialect)

    async def _fitting(self, api: str, body: bytes) -> tuple[RouteRule, RequestHead] | None:
        head = await run_aside(len(body), read_head, body)
        rule = self.upstreams.route(self._gateway.policies, head.name, api)
        return None if rule is None else (rule, head)

    async def prepare(
        self, caller: Caller, headers: Mapping[str, str], body: bytes, upstream_request: UpstreamRequest, query: str
    ) -> UpstreamCall:
        """A call that is about to be sent. Raises ApiError."""
        rule, head, reader, dialect = upstream_request
        users, name = dialect.names(head)
        recall = partial(self._gateway.matching.recall, caller, headers)
        sent_body = await run_aside(len(body), rename_model, body, rule.send_as) if rule.send_as else body
        named_before = await run_aside(len(body), reader.named, body, partial(recall, users))
        body = body if named_before is None else named_before.body
        request, outline = await run_aside(
            len(body), _read_request, reader, body, named_before is None or named_before.whole
        )
        await self._gateway.check_serves(caller)
        messages, digests, _ = request or ReadRequest([], match_keys.chain([], None))
        names = hints(headers, *users, name=name, field=dialect.names_in)
        used = () if named_before is None else named_before.used
        session, _, by = self._gateway.matching.session_for_call(caller, names, messages, digests, used)
        return UpstreamCall(
            session=session,
            dialect=dialect,
            body=body,
            outline=outline,
            identified_by=by,
            payer=caller.key,
            upstreams=self.upstreams,
            reader=reader,
            rule=rule,
            head=head,
            sent_body=sent_body,
            path=f"{reader.path}?{query}" if query else reader.path,
            headers=forwarded_headers(headers, session.tenant, session.subject),
            all_headers=headers,
            request=request,
            upstream=self.upstreams.chain(rule, dialect.name)[0],
            recall=recall,
            named_before=named_before,
        )

    async def pass_on(
        self, caller: Caller, request: Request, body: bytes, upstream_request: UpstreamRequest, below: str
    ) -> Response:
        """The upstream's answer to what is no call of a model, at a path below that of calls. Raises ApiError."""
        rule, _, reader, dialect = upstream_request
        api, path = dialect.name, f"{reader.path}{below}"
        return _response(await self._forward(caller, request, body, rule, api, path))

    async def ask_keeper(
        self, request: Request, dialect: Dialect, upstream: str, id: str, route: SideRoute
    ) -> Response:
        """What an upstream answers about a response that it keeps. One that it deleted, or has no more, can be
        named no more here either. Raises ApiError, 404 where there is no such upstream any more."""
        keeper = self.upstreams.of_name(upstream)
        if keeper is None:
            raise no_keeper(id, upstream)
        path = reader(dialect).path + route.below.format(id=quote(id, safe=""))
        path = f"{path}?{request.url.query}" if request.url.query else path
        headers = {name: request.headers[name] for name in FORWARDED_HEADERS if name in request.headers}

        async def to(upstream: Upstream) -> UpstreamReply:
            more = upstream.headers_of(request.headers)
            return await upstream.client.send(route.method, path, {**headers, **more})

        try:
            answer = await first_answer([keeper], to, id, self.upstreams.first_s)
        except EngineError as error:
            raise of_engine(error) from error
        if route.method == "DELETE" and (is_success(answer.status) or answer.status == 404):
            await self._gateway.delete(id)
        return _response(answer)

    async def embeddings(self, caller: Caller, request: Request, body: bytes) -> Response:
        """The upstream's answer to a request of embeddings, which counts for the caller's key and is not captured.
        Raises ApiError, 404 for a model of the engines."""
        match = await self._fitting(embeddings.NAME, body)
        if match is None:
            raise embeddings.refusal()
        rule, head = match
        self._gateway.check_spends(caller)
        users, broken_bytes = (head.user, head.safety_identifier), list[int]()
        try:
            answer = await self._forward(
                caller, request, body, rule, embeddings.NAME, embeddings.PATH, users, broken_bytes
            )
        except asyncio.CancelledError:  # its client went away, and the upstream charges all the same
            self._spend(caller, rule, body, embeddings.usage(b""))
            raise
        finally:
            for _ in broken_bytes:  # made at least in part, whatever another attempt came to
                self._spend(caller, rule, body, embeddings.usage(b""))
        if is_success(answer.status):
            usage = await run_aside(len(answer.body), embeddings.usage, answer.body)
            self._spend(caller, rule, body, usage)
        return _response(answer)

    def _spend(self, caller: Caller, rule: RouteRule, body: bytes, usage: tuple[int, int, int]) -> None:
        expense = expense_of(rule.prices, bill_usage(usage, len(body), 0))
        self._gateway.recorder.spending.add(caller.key, expense, now_micros())

    async def _forward(
        self,
        caller: Caller,
        request: Request,
        body: bytes,
        rule: RouteRule,
        api: str,
        path: str,
        users: Sequence[object] = (),
        broken_bytes: list[int] | None = None,
    ) -> UpstreamReply:
        """The upstream's answer to a request that is not captured; its session is not silent meanwhile.
        `broken_bytes` gets the bytes of each answer that broke off. Raises ApiError."""
        path = f"{path}?{request.url.query}" if request.url.query else path
        sent_body = await run_aside(len(body), rename_model, body, rule.send_as) if rule.send_as else body
        names = hints(request.headers, *users)
        headers = forwarded_headers(request.headers, caller.tenant, names.subject)
        session = caller.session or (self._gateway.sessions.find_by_name(caller.tenant, names) if names.name else None)

        async def to(upstream: Upstream) -> UpstreamReply:
            try:
                return await upstream.client.ask(path, sent_body, {**headers, **upstream.headers_of(request.headers)})
            except (EngineUnavailable, EngineTimeout) as error:
                if broken_bytes is not None and error.received:
                    broken_bytes.append(error.received)
                raise

        chain = self.upstreams.chain_of(rule, api)
        try:
            with CallInSession(session, new_id()) if session is not None else nullcontext():
                return await first_answer(chain, to, caller.key or caller.tenant, self.upstreams.first_s)
        except EngineError as error:
            raise of_engine(error) from error


def _read_request(
    reader: DialectReader, body: bytes, is_whole: bool
) -> tuple[ReadRequest | None, RequestOutline | None]:
    try:
        return reader.read_request(body, is_whole=is_whole), outline_request(body)
    except (ApiError, ValueError):
        return None, None


def forwarded_headers(headers: Mapping[str, str], tenant: str, subject: str) -> dict[str, str]:
    """The headers of a request that go on with it. All callers share one key of an upstream: an `idempotency-key`
    is made one of its tenant and end user."""
    out = {name: headers[name] for name in FORWARDED_HEADERS if name in headers}
    if ONCE in headers:
        digest = blake2b(digest_size=32)
        for text in (tenant, subject, headers[ONCE]):
            part = text.encode(errors="surrogatepass")
            digest.update(b"%d " % len(part) + part)
        out[ONCE] = digest.hexdigest()
    return out


def no_keeper(id: str, upstream: str) -> ApiError:
    """The refusal of what an upstream keeps that there is no more."""
    message = (
        f"Response with id '{id}' not found: upstream {upstream!r}, which keeps it, is not in the settings any more."
    )
    return ApiError(404, message)


def _response(answer: UpstreamReply) -> Response:
    return Response(answer.body, answer.status, dict(answer.headers))
