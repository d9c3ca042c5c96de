"""OTLP over HTTP: routes, bounds, and answers as the specification has them.

https://opentelemetry.io/docs/specs/otlp/#otlphttp

Invariants: a success is answered only when what it took is durable; every answer has the content type of its request,
whatever went wrong; what a client may send again is told so by 429 or 503 with Retry-After, what it should not by
another 4xx; a span that cannot be read is counted in `partialSuccess` and disturbs no other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import orjson
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from millrace.dialects.errors import ApiError
from millrace.infra import telemetry
from millrace.producers.capture.log import LogFull
from millrace.producers.gateway.http.admission import Intake, check_origin
from millrace.producers.gateway.http.callers import Caller, digest, key_of
from millrace.producers.gateway.http.visit import Visit, encoding_of
from millrace.producers.gateway.options import GatewayOptions
from millrace.producers.intake.otlp.receiver import OtlpReceiver
from millrace.producers.intake.otlp.request import ENCODINGS, JSON, LOGS, PROTOBUF, TRACES, BadBody, SpanBatch, read

logger = logging.getLogger(__name__)

ROUTES: Mapping[str, str] = {"/v1/traces": TRACES, "/v1/logs": LOGS}
HEALTH = "/health"
AT_ONCE = 2
"""bodies that are read at once: each holds many times its size while it is"""
RETRY_S = 1
FULL_RETRY_S = 10
"""seconds after which a client may try again where the disk or the log (Kafka) is in the way"""
_CODES = {400: 3, 401: 16, 403: 7, 404: 5, 405: 12, 408: 4, 413: 8, 415: 3, 429: 8, 500: 13, 503: 14}
"""of google.rpc"""
_requests = telemetry.counter("millrace.otlp.requests", "{request}", "requests, by signal and status")
_spans = telemetry.counter("millrace.otlp.spans", "{span}", "spans and log records that were taken")
_refused_spans = telemetry.counter(
    "millrace.otlp.refused", "{span}", "spans and log records that were refused, by reason"
)


class OtlpEndpoint:
    """The application of one receiver. options: its keys and bounds."""

    def __init__(self, receiver: OtlpReceiver, options: GatewayOptions) -> None:
        self.receiver = receiver
        self.options = options
        self.stopping = False
        """nothing is taken any more"""
        self._intake = Intake(options)
        self._reading = asyncio.Semaphore(AT_ONCE)
        # By digest, so that how long a look-up takes tells nothing about a key.
        self._tenants = {digest(key): tenant for key, tenant in options.keys.items()}

    @property
    def app(self) -> ASGIApp:
        """For a server."""
        return self._app

    @property
    def busy(self) -> int:
        """Requests in flight."""
        return sum(self._intake.in_flight.values())

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        visit = Visit(self._intake, receive)
        request = Request(scope, receive)
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        signal = ROUTES.get(scope["path"], "other")
        try:
            response = await self._answer(request, visit, signal, media)
        except ApiError as error:
            response = _refusal(media, error.status, str(error), error.retry_after_s)
            await visit.discard()
        except Exception:
            logger.exception("%s %s failed", request.method, request.url.path)
            response = _refusal(media, 500, "The receiver failed: see its log")
        finally:
            visit.close()
        _requests.add(1, signal=signal, status=response.status_code)
        await response(scope, receive, send)

    async def _answer(self, request: Request, visit: Visit, signal: str, media: str) -> Response:
        if not self._tenants:
            check_origin(Headers(scope=request.scope))
        if request.url.path == HEALTH:
            return self._health(request)
        if signal not in (TRACES, LOGS):
            raise ApiError(404, f"There is no {request.url.path}: send to {' or '.join(ROUTES)}")
        if request.method != "POST":
            raise ApiError(405, f"{request.url.path} takes POST alone")
        if self.stopping:
            raise ApiError(503, "The receiver stops: try again", retry_after_s=RETRY_S)
        tenant = self._tenant(request.headers)
        visit.enter(Caller(tenant, None))
        if media not in (JSON, PROTOBUF):
            raise ApiError(415, f"The content-type must be {PROTOBUF} or {JSON}")
        encoding, body = encoding_of(request.headers), await visit.body(request, ENCODINGS)
        try:
            async with self._reading:
                batch = await asyncio.to_thread(self._take, tenant, signal, media, encoding, body)
        except BadBody as error:
            raise ApiError(error.status, str(error)) from None
        except LogFull as error:
            logger.error("spans cannot be taken: %s", error)
            message = "The receiver has no room for more now: try again later"
            raise ApiError(503, message, retry_after_s=FULL_RETRY_S) from None
        await self.receiver.spans.durable()
        return _success(media, signal, batch)

    def _take(self, tenant: str, signal: str, media: str, encoding: str, body: bytes) -> SpanBatch:
        batch = read(signal, media, encoding, body, self.options.max_body_bytes)
        self.receiver.take(tenant, batch.spans)
        _spans.add(len(batch.spans), signal=signal)
        for reason, count in batch.refusals.items():
            _refused_spans.add(count, reason=reason)
        return batch

    def _tenant(self, headers: Mapping[str, str]) -> str:
        """Whose spans these are. Raises ApiError 401."""
        if not self._tenants:
            return self.options.tenant
        tenant = self._tenants.get(digest(key_of(headers)))
        if tenant is None:
            raise ApiError(401, "Send a key of [gateway.keys] as `authorization: Bearer KEY`")
        return tenant

    def _health(self, request: Request) -> Response:
        status = "stopping" if self.stopping else "ok"
        try:
            self._tenant(request.headers)
        except ApiError:
            return Response(orjson.dumps({"status": status}), media_type=JSON)
        receiver = self.receiver
        state = {
            "status": status,
            "open_traces": receiver.assembler.open,
            "waiting_bytes": receiver.spans.waiting,
            "captured": receiver.events.end,
            "forwarded": receiver.events.acked,
            "passed_over": dict(receiver.assembler.passed),
            "trouble": receiver.trouble,
        }
        return Response(orjson.dumps(state), media_type=JSON)


def _success(media: str, signal: str, batch: SpanBatch) -> Response:
    count = sum(batch.refusals.values())
    noun = "Spans" if signal == TRACES else "LogRecords"
    if media == JSON:
        partial = {f"rejected{noun}": str(count), "errorMessage": batch.detail}
        return Response(orjson.dumps({"partialSuccess": partial} if count else {}), media_type=JSON)
    answer: ExportTraceServiceResponse | ExportLogsServiceResponse
    if signal == TRACES:
        answer = ExportTraceServiceResponse()
        if count:
            answer.partial_success.rejected_spans = count
    else:
        answer = ExportLogsServiceResponse()
        if count:
            answer.partial_success.rejected_log_records = count
    if count:
        answer.partial_success.error_message = batch.detail
    return Response(answer.SerializeToString(), media_type=PROTOBUF)


def _refusal(media: str, status: int, message: str, retry_after_s: int | None = None) -> Response:
    """An error as google.rpc.Status."""
    headers = {"retry-after": str(retry_after_s)} if retry_after_s is not None else None
    code = _CODES.get(status, 2)
    if media == PROTOBUF:
        return Response(Status(code=code, message=message).SerializeToString(), status, headers, PROTOBUF)
    return Response(orjson.dumps({"code": code, "message": message}), status, headers, JSON)
