"""Traces that follow one trajectory through all processes, and metrics: OpenTelemetry behind a few calls.

A trajectory's trace id is its own id, and the context travels in the Kafka header `traceparent`: one span a process,
below the one that the gateway exports when the trajectory ends.
Invariants: with exporter `none` no SDK is loaded and a call costs one comparison; instruments may be made at import
time, before `setup`; telemetry never fails the work that it watches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar

from millrace.schemas.ids import Micros, now_micros
from millrace.schemas.json_values import JsonObject

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Tracer

HEADER = "traceparent"
MANY = "traceparents"
"""Kafka header of a record that belongs to several trajectories: their contexts, separated by commas"""

BUCKETS = {
    "s": [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0],
    "{version}": [0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0],
}
"""bounds of histograms by unit"""

Attribute = str | bool | int | float

_tracer: Tracer | None = None
_meter: Meter | None = None
_share = 1.0
chosen_ids: ContextVar[tuple[int, int] | None] = ContextVar("chosen_ids", default=None)
"""trace id and span id of the span that is being made, where they are not random"""
_NO_SPAN: AbstractContextManager[None] = nullcontext()


class Instrument:
    """A named measurement. `unit` is OpenTelemetry's (s, By, {token})."""

    instances: ClassVar[list[Instrument]] = []
    kind: ClassVar[str]

    __slots__ = ("_real", "name", "unit", "what")

    def __init__(self, name: str, unit: str, description: str) -> None:
        self.name, self.unit, self.what = name, unit, description
        self._real: Any = None
        Instrument.instances.append(self)
        if _meter is not None:
            self.bind(_meter)

    def bind(self, meter: Meter) -> None:
        """From here on measurements are recorded."""
        self._real = getattr(meter, f"create_{self.kind}")(self.name, self.unit, self.what, **self.more())

    def more(self) -> JsonObject:
        """What else the meter is told about it."""
        return {}


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

    def more(self) -> JsonObject:
        # The default buckets are made for milliseconds: every step and commit would fall into the first.
        return {"explicit_bucket_boundaries_advisory": BUCKETS[self.unit]} if self.unit in BUCKETS else {}

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


def counter(name: str, unit: str = "", description: str = "") -> Counter:
    """A new counter, named like `millrace.tokens`."""
    return Counter(name, unit, description)


def histogram(name: str, unit: str = "", description: str = "") -> Histogram:
    """A new histogram, named like `millrace.step.time`."""
    return Histogram(name, unit, description)


def gauge(name: str, unit: str = "", description: str = "") -> Gauge:
    """A new gauge, named like `millrace.lag`."""
    return Gauge(name, unit, description)


def is_exporting() -> bool:
    """Whether this process exports."""
    return _tracer is not None


def start(tracer: Tracer, meter: Meter, sample: float = 1.0) -> None:
    """Use this tracer and this meter: what `telemetry_setup` ends with, and what tests call with exporters in memory.
    `sample`: share of trajectories that are traced."""
    global _tracer, _meter, _share
    _tracer, _meter, _share = tracer, meter, sample
    for instrument in Instrument.instances:
        instrument.bind(meter)


def span(
    name: str,
    headers: Mapping[str, bytes | str] | None = None,
    trajectory: str = "",
    since: Micros | None = None,
    **attributes: Attribute,
) -> AbstractContextManager[None]:
    """A span around a block: child of the context in `headers`, else of the trajectory's own span, else of the block
    that encloses it. It begins at `since` when that is given and not in the future. An exception that leaves the block
    is recorded and goes on."""
    return _NO_SPAN if _tracer is None else _span(_tracer, name, headers or {}, trajectory, since, attributes)


def context(root: str, trajectory: str = "") -> str:
    """The `traceparent` of a trajectory's own span, which may not be exported yet. `root` is its root trajectory, whose
    id names the trace; empty when telemetry is off, or the trajectory is not traced."""
    if _tracer is None or not _is_sample(trace_id := _trace_id(root)):
        return ""
    return f"00-{trace_id:032x}-{_span_id(_trace_id(trajectory) or trace_id):016x}-01"


def export_own_span(name: str, root: str, trajectory: str, since: Micros, **attributes: Attribute) -> None:
    """Export a trajectory's own span, from `since` until now: the parent of what `context` led other processes to.
    That of a root trajectory is the root of the trace; others are its children."""
    trace_id, trajectory_id = _trace_id(root), _trace_id(trajectory)
    if _tracer is None or not trajectory_id or not _is_sample(trace_id):
        return
    from opentelemetry.context import Context

    parent = Context() if trajectory_id == trace_id else _inside(trace_id)
    token = chosen_ids.set((trace_id, _span_id(trajectory_id)))
    try:
        span = _tracer.start_span(
            name, parent, attributes={"millrace.trajectory": trajectory, **attributes}, start_time=_nanos(since)
        )
    finally:
        chosen_ids.reset(token)
    span.end()


@contextmanager
def _span(
    tracer: Tracer,
    name: str,
    headers: Mapping[str, bytes | str],
    trajectory: str,
    since: Micros | None,
    attributes: Mapping[str, Attribute],
) -> Iterator[None]:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = None
    if value := headers.get(HEADER):
        text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
        parent = TraceContextTextMapPropagator().extract({HEADER: text})
    elif trace_id := _trace_id(trajectory):
        parent = _inside(trace_id)
    if trajectory:
        attributes = {"millrace.trajectory": trajectory, **attributes}
    with tracer.start_as_current_span(name, parent, attributes=attributes, start_time=_nanos(since)):
        yield


def _inside(trace_id: int) -> Context:
    """The context of the root span of a trace: a process that was not handed it knows it from the id alone."""
    from opentelemetry import trace

    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if _is_sample(trace_id) else trace.TraceFlags.DEFAULT)
    span = trace.SpanContext(trace_id, _span_id(trace_id), is_remote=True, trace_flags=flags)
    return trace.set_span_in_context(trace.NonRecordingSpan(span))


def _nanos(since: Micros | None) -> int | None:
    """OpenTelemetry's time; no span ends before it began, whatever another machine's clock says."""
    return None if since is None else min(since, now_micros()) * 1000


def _span_id(id: int) -> int:
    return id & (2**64 - 1) or 1


def _trace_id(trajectory: str) -> int:
    """The 128 bits of a UUID, 0 for any other text."""
    digits = trajectory.replace("-", "")
    try:
        return int(digits, 16) if len(digits) == 32 else 0
    except ValueError:
        return 0


def _is_sample(trace_id: int) -> bool:
    """Every process traces the same trajectories, for the choice depends on the id alone."""
    # The low 32 bits of a uuid7 are random; higher ones are time, version and variant.
    return bool(trace_id) and trace_id & (2**32 - 1) < _share * 2**32
