"""An OpenTelemetry collector: OTLP over HTTP, decoded with the protocol's own messages and kept."""

from __future__ import annotations

import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from millrace.infra.process.net import LOCALHOST


class Span(NamedTuple):
    """One exported span. `service` and `instance` say which process sent it; ids are hexadecimal, `parent` empty for a
    root; times in nanoseconds."""

    service: str
    instance: str
    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int


class Collector:
    """Listens from `with` on. `silent`: takes requests and never answers them until the block ends."""

    def __init__(self, *, silent: bool = False) -> None:
        self.silent = silent
        self.asked = 0
        self.spans: list[Span] = []
        self.headers: list[dict[str, str]] = []
        self.metrics: dict[str, dict[str, Any]] = defaultdict(dict)
        """newest metric by service, by name"""
        self._over = threading.Event()
        self._server = ThreadingHTTPServer((LOCALHOST, 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://{LOCALHOST}:{self._server.server_address[1]}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.asked += 1
                if collector.silent:
                    collector._over.wait()
                    return
                collector.headers.append(dict(self.headers))
                collector._take(self.path, body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler

    def _take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service, instance = _who(resource)
                self.spans += [
                    Span(
                        service,
                        instance,
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                    )
                    for scope in resource.scope_spans
                    for span in scope.spans
                ]
        elif path == "/v1/metrics":
            for found in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                service, _ = _who(found)
                self.metrics[service] |= {m.name: m for scope in found.scope_metrics for m in scope.metrics}
        else:
            raise AssertionError(f"a collector has no {path}")

    def traces(self) -> dict[str, list[Span]]:
        """Spans by trace."""
        out: dict[str, list[Span]] = defaultdict(list)
        for span in list(self.spans):
            out[span.trace].append(span)
        return out

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()


def _who(message: Any) -> tuple[str, str]:
    named = {pair.key: pair.value.string_value for pair in message.resource.attributes}
    return named["service.name"], named["service.instance.id"]
