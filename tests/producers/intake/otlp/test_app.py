"""The receiver over HTTP, as exporters see it: the real SDK sends, and anybody sends anything."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.rpc.status_pb2 import Status
from hypothesis import HealthCheck, settings
from hypothesis import given as drawn
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from millrace.infra.process.net import LOCALHOST, free_ports, is_listening, wait_until
from millrace.producers.intake.otlp.app import OtlpEndpoint
from millrace.producers.intake.otlp.receiver import OtlpReceiver
from millrace.producers.intake.otlp.serve import serve
from millrace.schemas import codec
from tests.producers.intake.otlp.test_request import BAD, in_json, requests
from tests.support.imported import logged, traced
from tests.support.otlp_process import KEY, TENANT, made, options
from tests.support.spans import a_call, a_span, an_evaluation

JSON, PROTOBUF = "application/json", "application/x-protobuf"
LIMIT = 1 << 20
GOOD = a_span(1, a_call("q", "a", "r1"))


class Running:
    """A receiver that listens in a thread."""

    def __init__(self, folder: Path, *, max_waiting: int = 1 << 30, keys: Mapping[str, str] | None = None) -> None:
        self._options = replace(options(LIMIT), keys=keys) if keys else options(LIMIT)
        (self.port,) = free_ports(1)
        self.receiver: OtlpReceiver = made(folder, 3600, max_waiting)
        self.url = f"http://{LOCALHOST}:{self.port}"
        self._made = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        wait_until(lambda: is_listening(LOCALHOST, self.port), "the receiver", 60)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await serve(OtlpEndpoint(self.receiver, self._options), LOCALHOST, self.port, self._stop)

    def post(self, path: str, body: bytes, media: str = JSON, **headers: str) -> httpx.Response:
        given = {"content-type": media, "authorization": f"Bearer {KEY}"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        return httpx.post(self.url + path, content=body, headers={k: v for k, v in given.items() if v}, timeout=60)

    def ended(self) -> list[dict[str, Any]]:
        """The events of all that came, once every conversation is over."""
        self.receiver.close_due(ends_all=True)
        return [dict(codec.decode_as("Event", kept.entry.value)) for kept in self.receiver.events.read()]

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self.receiver.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """For tests that take nothing from it."""
    running = Running(tmp_path_factory.mktemp("shared"))
    yield running
    running.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made_here = Running(tmp_path)
    yield made_here
    made_here.close()


def test_what_the_sdk_exports_is_one_episode(running: Running) -> None:
    from opentelemetry._logs import SeverityNumber
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    headers = {"authorization": f"Bearer {KEY}"}
    spans = TracerProvider(resource=Resource.create({"service.name": "shop"}))
    exporter = OTLPSpanExporter(f"{running.url}/v1/traces", headers=headers, compression=Compression.Gzip)
    spans.add_span_processor(BatchSpanProcessor(exporter, max_export_batch_size=2))
    logs = LoggerProvider()
    logs.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter(f"{running.url}/v1/logs", headers=headers)))
    tracer, logger = spans.get_tracer("test"), logs.get_logger("test")
    agent = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "helper"}
    with tracer.start_as_current_span("invoke_agent helper", attributes=agent):
        with tracer.start_as_current_span("chat m", attributes=a_call("one", "two", "r1")):
            pass
        tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "look", "gen_ai.tool.call.id": "c1"}
        with tracer.start_as_current_span("execute_tool look", attributes=tool):
            pass
        with tracer.start_as_current_span(
            "chat m", attributes={"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
        ):
            logger.emit(
                event_name="gen_ai.user.message", body={"content": "three"}, severity_number=SeverityNumber.INFO
            )
            logger.emit(event_name="gen_ai.choice", body={"message": {"content": "four"}, "finish_reason": "stop"})
            score = {"gen_ai.evaluation.name": "judge", "gen_ai.evaluation.score.value": 0.5}
            logger.emit(event_name="gen_ai.evaluation.result", attributes=score)
    for provider in (spans, logs):
        assert provider.force_flush()
        provider.shutdown()
    events = running.ended()
    assert [one["kind"] for one in events] == [
        *("episode_started", "model_call", "tool_call", "tool_result", "model_call", "reward", "episode_ended")
    ]
    assert {(one["tenant"], one["policy"], one["trajectory"]) for one in events} == {
        (TENANT, "p", events[0]["trajectory"])
    }
    calls = [codec.decode_body("model_call", one["body"]) for one in events if one["kind"] == "model_call"]
    assert [json.loads(one["response"])["choices"][0]["message"]["content"] for one in calls] == ["two", "four"]


@pytest.mark.parametrize("media", [JSON, PROTOBUF])
@pytest.mark.parametrize("path", ["/v1/traces", "/v1/logs"])
def test_an_empty_request_is_a_success_in_its_own_form(shared: Running, path: str, media: str) -> None:
    answer = shared.post(path, b"{}" if media == JSON else b"", media)
    assert (answer.status_code, answer.headers["content-type"]) == (200, media)
    assert answer.content == (b"{}" if media == JSON else b"")


def test_a_bad_span_is_counted_and_the_others_are_taken(running: Running) -> None:
    message = ExportTraceServiceRequest()
    span = message.resource_spans.add().scope_spans.add().spans.add(trace_id=b"\1" * 16, span_id=b"")
    assert span is not None
    answer = running.post("/v1/traces", json.dumps(traced([GOOD, BAD["bad_message"]])).encode())
    assert (answer.status_code, answer.json()["partialSuccess"]["rejectedSpans"]) == (200, "1")
    assert answer.json()["partialSuccess"]["errorMessage"].startswith("bad_message")
    read = ExportTraceServiceResponse.FromString(
        running.post("/v1/traces", message.SerializeToString(), PROTOBUF).content
    )
    assert read.partial_success.rejected_spans == 1
    beside = running.post("/v1/logs", json.dumps(logged([an_evaluation(1, 1e9)])).encode())
    assert beside.json()["partialSuccess"]["rejectedLogRecords"] == "1"
    assert ExportLogsServiceResponse.FromString(b"").partial_success.rejected_log_records == 0
    assert [one["kind"] for one in running.ended()].count("model_call") == 1


REFUSED: dict[str, tuple[int, dict[str, Any]]] = {
    "no key": (401, {"authorization": ""}),
    "another key": (401, {"authorization": "Bearer other"}),
    "a key of a session": (401, {"authorization": "Bearer mr-x"}),
    "no form": (415, {"content_type": "text/plain"}),
    "another compression": (415, {"content_encoding": "br"}),
    "no gzip": (400, {"content_encoding": "gzip"}),
    "no JSON": (400, {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_taken_is_refused_for_good(shared: Running, case: str) -> None:
    status, headers = REFUSED[case]
    answer = shared.post("/v1/traces", b"\xff{", **headers)
    assert (answer.status_code, "retry-after" in answer.headers) == (status, False)
    assert answer.headers["content-type"] == JSON
    assert answer.json()["message"]


def test_errors_have_the_form_of_the_request(shared: Running) -> None:
    answer = shared.post("/v1/traces", b"\xff", PROTOBUF)
    assert (answer.status_code, answer.headers["content-type"]) == (400, PROTOBUF)
    assert Status.FromString(answer.content).message
    assert httpx.get(f"{shared.url}/v1/traces").status_code == 405
    assert shared.post("/v1/metrics", b"{}").status_code == 404


def test_bombs_and_floods_are_refused_and_the_next_request_is_served(shared: Running) -> None:
    bomb = gzip.compress(b"\0" * (50 << 20))
    deep = b'{"resourceSpans":' + b"[" * 100_000
    for body, headers, status in (
        (bomb, {"content_encoding": "gzip"}, 413),
        (b"x" * (LIMIT + 1), {}, 413),
        (deep, {}, 400),
    ):
        assert shared.post("/v1/traces", body, **headers).status_code == status
    assert shared.post("/v1/traces", b"{}").status_code == 200


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@drawn(
    st.binary(max_size=200)
    | requests().map(lambda one: one[1].SerializeToString())
    | requests().map(lambda one: in_json(one[1])),
    st.sampled_from((JSON, PROTOBUF, "text/html", "")),
    st.sampled_from(("", "gzip", "deflate", "identity", "zstd")),
    st.sampled_from(("/v1/traces", "/v1/logs")),
)
def test_anything_is_taken_or_refused(shared: Running, body: bytes, media: str, encoding: str, path: str) -> None:
    answer = shared.post(path, body, media, content_encoding=encoding)
    assert answer.status_code in (200, 400, 413, 415)
    assert shared.post("/v1/traces", b"{}").status_code == 200


def test_a_full_log_asks_to_try_again(tmp_path: Path) -> None:
    full = Running(tmp_path, max_waiting=1000)
    try:
        body = json.dumps(traced([a_span(1, a_call("q" * 2000, "a", "r1"))])).encode()
        answer = full.post("/v1/traces", body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
        assert full.ended() == []
    finally:
        full.close()


def test_health_tells_a_stranger_little(shared: Running) -> None:
    assert httpx.get(f"{shared.url}/health").json() == {"status": "ok"}
    told = httpx.get(f"{shared.url}/health", headers={"authorization": f"Bearer {KEY}"}).json()
    assert {"open_traces", "captured", "passed_over"} <= told.keys()
