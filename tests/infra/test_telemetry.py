"""Telemetry: one trace a trajectory over processes, instruments made before setup, nothing at all when it is off."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from infra import telemetry
from schemas.ids import new_id


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> tuple[InMemorySpanExporter, InMemoryMetricReader]:
    spans, metrics = InMemorySpanExporter(), InMemoryMetricReader()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(telemetry, "_tracer", None)
    monkeypatch.setattr(telemetry, "_meter", None)
    monkeypatch.setattr(telemetry.Instrument, "made", [])
    early = telemetry.counter("millrace.early")
    telemetry.start(provider.get_tracer("t"), MeterProvider([metrics]).get_meter("t"))
    early.add(2, kind="x")
    return spans, metrics


def test_off_costs_nothing_and_loads_no_sdk() -> None:
    code = (
        "import sys; from infra import telemetry as t; from infra.config import load; t.setup(load(), 'r');"
        "c = t.counter('a'); c.add(1)\nwith t.span('x', {}): pass\n"
        "h = {}; t.inject(h); assert h == {}; assert not [m for m in sys.modules if m.startswith('opentelemetry.sdk')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_spans_of_two_processes_share_the_trajectorys_trace(exported: tuple[InMemorySpanExporter, Any]) -> None:
    trajectory, headers = new_id(), dict[str, bytes]()
    with telemetry.span("gateway.call", trajectory=trajectory, tokens=3):
        telemetry.inject(headers)
    with telemetry.span("refine", headers):
        pass
    with telemetry.span("learn", trajectory=trajectory):
        pass
    call, refine, learn = exported[0].get_finished_spans()
    assert f"{call.context.trace_id:032x}" == trajectory.replace("-", "")
    assert refine.parent
    assert refine.parent.span_id == call.context.span_id
    assert {span.context.trace_id for span in (call, refine, learn)} == {call.context.trace_id}
    assert dict(call.attributes or {}) == {"millrace.trajectory": trajectory, "tokens": 3}


def test_an_error_is_recorded_and_goes_on(exported: tuple[InMemorySpanExporter, Any]) -> None:
    with pytest.raises(ZeroDivisionError), telemetry.span("work"):
        _ = 1 / 0
    assert exported[0].get_finished_spans()[0].events[0].name == "exception"


@pytest.mark.parametrize("header", [b"", b"\xff", b"00-zz-1-01", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01"])
def test_a_broken_header_begins_a_new_trace(header: bytes, exported: tuple[InMemorySpanExporter, Any]) -> None:
    with telemetry.span("work", {"traceparent": header}):
        pass
    assert exported[0].get_finished_spans()[0].parent is None


def test_the_sampled_share_depends_on_the_trajectory_alone(
    exported: tuple[InMemorySpanExporter, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "_share", 0.5)
    ids = [new_id() for _ in range(100)]
    for _ in range(2):
        for one in ids:
            with telemetry.span("work", trajectory=one):
                pass
    traced = [span.context.trace_id for span in exported[0].get_finished_spans()]
    assert 20 < len(set(traced)) < 80
    assert len(traced) == 2 * len(set(traced))


def test_instruments_made_before_setup_are_recorded(exported: tuple[Any, InMemoryMetricReader]) -> None:
    telemetry.histogram("millrace.step.time", "s").record(0.5)
    telemetry.gauge("millrace.lag").set(7)
    data = exported[1].get_metrics_data()
    assert data
    metrics = {m.name: m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
    assert set(metrics) == {"millrace.early", "millrace.step.time", "millrace.lag"}
    assert next(iter(metrics["millrace.early"].data.data_points)).attributes == {"kind": "x"}


@pytest.mark.slow
def test_the_console_shows_a_span_and_a_metric() -> None:
    code = (
        "from infra import telemetry as t; from infra.config import load\n"
        "t.setup(load(flags={'telemetry.exporter': 'console'}), 'seal')\n"
        "t.counter('millrace.c').add(5)\nwith t.span('fold'): pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert '"fold"' in done.stderr
    assert "millrace.c" in done.stderr
    assert "seal" in done.stderr
