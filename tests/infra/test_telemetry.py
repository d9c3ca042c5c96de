"""Telemetry: one trace a trajectory over processes, instruments made before setup, nothing at all when it is off."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from millrace.infra import telemetry, telemetry_export
from millrace.schemas.ids import new_id, now_micros


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> tuple[InMemorySpanExporter, InMemoryMetricReader]:
    spans, metrics = InMemorySpanExporter(), InMemoryMetricReader()
    traces, meters = telemetry_export.make([SimpleSpanProcessor(spans)], [metrics])
    monkeypatch.setattr(telemetry, "_tracer", None)
    monkeypatch.setattr(telemetry, "_meter", None)
    monkeypatch.setattr(telemetry.Instrument, "instances", [])
    early = telemetry.counter("millrace.early")
    telemetry.start(traces.get_tracer("t"), meters.get_meter("t"))
    early.add(2, kind="x")
    return spans, metrics


def test_off_costs_nothing_and_loads_no_sdk() -> None:
    code = (
        "import sys; from millrace.infra import telemetry as t, telemetry_setup as s;"
        "from millrace.infra.config import load; s.setup(load(), 'r');"
        "c = t.counter('a'); c.add(1)\nwith t.span('x', {}): pass\n"
        "assert t.context('0' * 31 + '1') == ''; t.export_own_span('x', '', '', 0);"
        "assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_spans_of_all_processes_lie_below_the_trajectorys_own(exported: tuple[InMemorySpanExporter, Any]) -> None:
    trajectory, began = new_id(), now_micros() - 2_000_000
    header = telemetry.context(trajectory, trajectory)
    with telemetry.span("refine", {"traceparent": header.encode()}, since=began):
        pass
    with telemetry.span("learn", trajectory=trajectory):
        pass
    telemetry.export_own_span("gateway", trajectory, trajectory, began, steps=3)
    refine, learn, own = exported[0].get_finished_spans()
    assert f"{own.context.trace_id:032x}" == trajectory.replace("-", "")
    assert own.parent is None
    for span in (refine, learn):
        assert span.parent
        assert (span.context.trace_id, span.parent.span_id) == (own.context.trace_id, own.context.span_id)
    assert refine.start_time == own.start_time == began * 1000
    assert dict(own.attributes or {}) == {"millrace.trajectory": trajectory, "steps": 3}


def test_a_sub_agents_span_lies_below_its_roots(exported: tuple[InMemorySpanExporter, Any]) -> None:
    root, child = new_id(), new_id()
    with telemetry.span("refine", {"traceparent": telemetry.context(root, child)}):
        pass
    for one in (child, root):
        telemetry.export_own_span("gateway", root, one, now_micros())
    refine, below, above = exported[0].get_finished_spans()
    assert refine.parent
    assert below.parent
    assert [refine.parent.span_id, below.parent.span_id] == [below.context.span_id, above.context.span_id]
    assert len({span.context.trace_id for span in (refine, below, above)}) == 1


def test_no_span_begins_after_its_end(exported: tuple[InMemorySpanExporter, Any]) -> None:
    with telemetry.span("refine", since=now_micros() + 60_000_000):
        pass
    (span,) = exported[0].get_finished_spans()
    assert (span.start_time or 0) <= (span.end_time or 0)


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
        for one in ids:
            assert bool(telemetry.context(one)) == (
                one in {s.attributes["millrace.trajectory"] for s in exported[0].get_finished_spans()}
            )
            telemetry.export_own_span("own", one, one, now_micros())
    traced = [span.context.trace_id for span in exported[0].get_finished_spans()]
    assert 20 < len(set(traced)) < 80
    assert len(traced) == 4 * len(set(traced))


def test_instruments_made_before_setup_are_recorded(exported: tuple[Any, InMemoryMetricReader]) -> None:
    telemetry.histogram("millrace.step.time", "s").record(0.5)
    telemetry.gauge("millrace.lag").set(7)
    data = exported[1].get_metrics_data()
    assert data
    metrics = {m.name: m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
    assert set(metrics) == {"millrace.early", "millrace.step.time", "millrace.lag"}
    assert next(iter(metrics["millrace.early"].data.data_points)).attributes == {"kind": "x"}
    (steps,) = metrics["millrace.step.time"].data.data_points
    assert 0.5 in steps.explicit_bounds, "seconds are told apart"


@pytest.mark.slow
def test_the_console_shows_a_span_and_a_metric() -> None:
    code = (
        "from millrace.infra import telemetry as t, telemetry_setup as s; from millrace.infra.config import load\n"
        "s.setup(load(flags={'telemetry.exporter': 'console'}), 'seal')\n"
        "t.counter('millrace.c').add(5)\nwith t.span('fold'): pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert '"fold"' in done.stderr
    assert "millrace.c" in done.stderr
    assert "seal" in done.stderr
