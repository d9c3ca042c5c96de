"""The OpenTelemetry SDK as Millrace uses it; imported only where telemetry is on.

Invariants: exporting happens in threads of its own, whose queue drops what is too much, so a collector that is dead,
slow or silent holds up no role while it works and at most LEAVE_S while it ends; what the exporters complain about is
said once a minute.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence

from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    ConsoleMetricExporter,
    MetricExporter,
    MetricReader,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Tracer

from millrace.infra import telemetry
from millrace.infra.config import Settings
from millrace.infra.config import Telemetry as Section

EXPORT_S = 5.0
"""longest attempt to hand something to the collector"""
LEAVE_S = 3.0
"""longest wait of a process that ends for what it has not handed over"""
LOGGERS = ("trace_exporter", "metric_exporter")
QUIET_S = 60.0


class Ids(RandomIdGenerator):
    """Random ids, but for the spans whose ids follow from their trajectory's."""

    def generate_trace_id(self) -> int:
        ids = telemetry.chosen_ids.get()
        return ids[0] if ids else super().generate_trace_id()

    def generate_span_id(self) -> int:
        ids = telemetry.chosen_ids.get()
        return ids[1] if ids else super().generate_span_id()


class Seldom(logging.Filter):
    """Lets a logger speak once in QUIET_S: a dead collector is one fact, however often it is met."""

    def __init__(self) -> None:
        super().__init__()
        self._quiet_until = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR or time.monotonic() < self._quiet_until:
            return False
        self._quiet_until = time.monotonic() + QUIET_S
        return True


def make(
    processors: Sequence[SpanProcessor], readers: Sequence[MetricReader], resource: Resource | None = None
) -> tuple[TracerProvider, MeterProvider]:
    """Providers that export through these. Which trajectories are traced is decided by their ids, in `telemetry`."""
    traces = TracerProvider(resource=resource, id_generator=Ids(), shutdown_on_exit=False)
    for processor in processors:
        traces.add_span_processor(processor)
    return traces, MeterProvider(readers, resource or Resource.create(), shutdown_on_exit=False)


def setup(settings: Settings, role: str) -> tuple[Tracer, Meter]:
    """A tracer and a meter that export as the settings say, until the process ends."""
    resource = Resource.create(
        {
            "service.namespace": f"millrace.{settings.namespace}",
            "service.name": role,
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        }
    )
    spans, metrics = _exporters(settings.telemetry)
    reader = PeriodicExportingMetricReader(
        metrics,
        export_interval_millis=settings.telemetry.interval_s * 1000,
        export_timeout_millis=EXPORT_S * 1000,
    )
    traces, meters = make([BatchSpanProcessor(spans)], [reader], resource)
    atexit.register(leave, traces, meters)
    return traces.get_tracer("millrace"), meters.get_meter("millrace")


def _exporters(section: Section) -> tuple[SpanExporter, MetricExporter]:
    if section.exporter == "console":
        return ConsoleSpanExporter(out=sys.stderr), ConsoleMetricExporter(out=sys.stderr)
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    for name in LOGGERS:
        logging.getLogger(f"opentelemetry.exporter.otlp.proto.http.{name}").addFilter(Seldom())
    base, headers = section.endpoint.rstrip("/"), {k: v.get_secret_value() for k, v in section.headers.items()}
    return (
        OTLPSpanExporter(endpoint=f"{base}/v1/traces", headers=headers, timeout=EXPORT_S),
        OTLPMetricExporter(endpoint=f"{base}/v1/metrics", headers=headers, timeout=EXPORT_S),
    )


def leave(traces: TracerProvider, meters: MeterProvider) -> None:
    """Hand over what is left, for LEAVE_S at most."""
    threads = [threading.Thread(target=one.shutdown, daemon=True) for one in (traces, meters)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + LEAVE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
