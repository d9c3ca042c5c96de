"""Traces that follow one trajectory through all processes, and metrics: OpenTelemetry behind a few calls.

A trajectory's trace id is its own id, and the context travels in the Kafka header `traceparent`: one span a process.
Invariants: with exporter `none` no SDK is loaded and a call costs one comparison; instruments may be made at import
time, before `setup`; telemetry never fails the work that it watches.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Tracer

    from infra.config import Settings

HEADER = "traceparent"

Attribute = str | bool | int | float

_tracer: Tracer | None = None
_meter: Meter | None = None
_share = 1.0
_NOTHING: AbstractContextManager[None] = nullcontext()


class Instrument:
    """A named measurement. `unit` is OpenTelemetry's (s, By, {token})."""

    made: ClassVar[list[Instrument]] = []
    kind: ClassVar[str]

    __slots__ = ("_real", "name", "unit", "what")

    def __init__(self, name: str, unit: str, what: str) -> None:
        self.name, self.unit, self.what = name, unit, what
        self._real: Any = None
        Instrument.made.append(self)
        if _meter is not None:
            self.bind(_meter)

    def bind(self, meter: Meter) -> None:
        """From here on measurements are recorded."""
        self._real = getattr(meter, f"create_{self.kind}")(self.name, unit=self.unit, description=self.what)


class Counter(Instrument):
    """Only rises."""

    kind = "counter"
    __slots__ = ()

    def add(self, value: float = 1, **labels: Attribute) -> None:
        if self._real is not None:
            self._real.add(value, labels)


class Histogram(Instrument):
    """Keeps the distribution."""

    kind = "histogram"
    __slots__ = ()

    def record(self, value: float, **labels: Attribute) -> None:
        if self._real is not None:
            self._real.record(value, labels)


class Gauge(Instrument):
    """Keeps the last value."""

    kind = "gauge"
    __slots__ = ()

    def set(self, value: float, **labels: Attribute) -> None:
        if self._real is not None:
            self._real.set(value, labels)


def counter(name: str, unit: str = "", what: str = "") -> Counter:
    """A new counter, named like `millrace.tokens`."""
    return Counter(name, unit, what)


def histogram(name: str, unit: str = "", what: str = "") -> Histogram:
    """A new histogram, named like `millrace.step.time`."""
    return Histogram(name, unit, what)


def gauge(name: str, unit: str = "", what: str = "") -> Gauge:
    """A new gauge, named like `millrace.lag`."""
    return Gauge(name, unit, what)


def setup(settings: Settings, role: str) -> None:
    """Start exporting for this process as `role`; with exporter `none` nothing happens. Once a process."""
    global _share
    telemetry = settings.telemetry
    if telemetry.exporter == "none" or _tracer is not None:
        return
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricExporter, PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    spans: SpanExporter
    metrics: MetricExporter
    if telemetry.exporter == "console":
        spans, metrics = ConsoleSpanExporter(out=sys.stderr), ConsoleMetricExporter(out=sys.stderr)
    else:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        base, headers = telemetry.endpoint.rstrip("/"), {k: v.get_secret_value() for k, v in telemetry.headers.items()}
        spans = OTLPSpanExporter(endpoint=f"{base}/v1/traces", headers=headers)
        metrics = OTLPMetricExporter(endpoint=f"{base}/v1/metrics", headers=headers)
    resource = Resource.create(
        {
            "service.namespace": f"millrace.{settings.namespace}",
            "service.name": role,
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        }
    )
    _share = telemetry.sample
    sampler = ParentBased(TraceIdRatioBased(telemetry.sample))
    traces = TracerProvider(resource=resource, sampler=sampler)
    traces.add_span_processor(BatchSpanProcessor(spans))
    reader = PeriodicExportingMetricReader(metrics, export_interval_millis=telemetry.interval_s * 1000)
    start(traces.get_tracer("millrace"), MeterProvider([reader], resource).get_meter("millrace"))


def start(tracer: Tracer, meter: Meter) -> None:
    """Use this tracer and this meter: what `setup` ends with, and what tests call with exporters in memory."""
    global _tracer, _meter
    _tracer, _meter = tracer, meter
    for instrument in Instrument.made:
        instrument.bind(meter)


def span(
    name: str, headers: Mapping[str, bytes | str] | None = None, trajectory: str = "", **attributes: Attribute
) -> AbstractContextManager[None]:
    """A span around a block: child of the context in `headers`, else of the trajectory's trace, else of the block that
    encloses it. An exception that leaves the block is recorded and goes on."""
    return _NOTHING if _tracer is None else _span(_tracer, name, headers or {}, trajectory, attributes)


def inject(headers: MutableMapping[str, bytes]) -> None:
    """Put the current context into Kafka headers. Without a current span nothing changes."""
    if _tracer is None:
        return
    from opentelemetry.trace import get_current_span

    context = get_current_span().get_span_context()
    if context.is_valid:
        headers[HEADER] = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}".encode()


@contextmanager
def _span(
    tracer: Tracer,
    name: str,
    headers: Mapping[str, bytes | str],
    trajectory: str,
    attributes: Mapping[str, Attribute],
) -> Iterator[None]:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = None
    if value := headers.get(HEADER):
        text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
        parent = TraceContextTextMapPropagator().extract({HEADER: text})
    elif trace_id := _trace_id(trajectory):
        # The id of the trajectory names the trace; a parent that no process exports makes all its spans siblings.
        made = trace.SpanContext(trace_id, trace_id & (2**64 - 1) or 1, is_remote=True, trace_flags=_flags(trace_id))
        parent = trace.set_span_in_context(trace.NonRecordingSpan(made))
    if trajectory:
        attributes = {"millrace.trajectory": trajectory, **attributes}
    with tracer.start_as_current_span(name, context=parent, attributes=attributes):
        yield


def _trace_id(trajectory: str) -> int:
    """The 128 bits of a UUID, 0 for any other text."""
    digits = trajectory.replace("-", "")
    try:
        return int(digits, 16) if len(digits) == 32 else 0
    except ValueError:
        return 0


def _flags(trace_id: int) -> Any:
    """Every process samples the same trajectories, for the choice depends on the id alone."""
    from opentelemetry.trace import TraceFlags

    # The low 32 bits of a uuid7 are random; higher ones are time, version and variant.
    return TraceFlags(TraceFlags.SAMPLED if trace_id & (2**32 - 1) < _share * 2**32 else TraceFlags.DEFAULT)
