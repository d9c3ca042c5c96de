"""Telemetry of real processes on a real broker, exported to a real receiver: one trajectory is one trace through all of
them, the figures arrive with their units, and a collector that is dead or silent holds nobody up."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from millrace.consumers import version_zero
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.config import Settings, load
from millrace.infra.log.base import Bus, Outgoing
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.topics import full_name
from millrace.infra.process.net import LOCALHOST, free_ports
from millrace.infra.telemetry import HEADER, MANY
from millrace.infra.telemetry_export import LOGGERS, QUIET_S
from millrace.schemas import codec
from millrace.schemas.ids import now_micros
from tests.support import tiny_model
from tests.support.gateway_world import status
from tests.support.instant_engine import InstantEngine, serving


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


pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240.0
FILE = """
namespace = "{namespace}"
home = "home"
[kafka]
bootstrap = "{broker}"
[policy]
batch = 1
group_size = 2
[gateway]
port = {port}
[engine]
url = "{engine}"
[rollout]
agent = "millrace.apps.demo.sort_agent:agent"
tasks = "tasks.jsonl"
ahead = 2
[learner]
max_versions = 1
minibatches = 1
[telemetry]
exporter = "otlp"
endpoint = "{collector}"
headers = {{ authorization = "Bearer hunter2" }}
interval_s = 0.5
"""


class Machine:
    """The roles of one deployment as processes, and what they wrote."""

    def __init__(self, folder: Path, bus: Bus, settings: Settings) -> None:
        self.folder, self.bus, self.settings = folder, bus, settings
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *roles: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        for role in roles:
            with (self.folder / f"{role}.log").open("ab") as log:
                self.processes[role] = subprocess.Popen(
                    [sys.executable, "-m", "millrace.apps.cli.main", role],
                    cwd=self.folder,
                    env=environment,
                    stdout=log,
                    stderr=log,
                )

    async def stop(self) -> dict[str, int]:
        """SIGTERM to all; gives their exit codes."""
        for process in self.processes.values():
            process.terminate()
        return {role: await asyncio.to_thread(p.wait, 60) for role, p in self.processes.items()}

    async def until(self, holds: Callable[[], bool]) -> None:
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while not await asyncio.to_thread(holds):
            assert asyncio.get_running_loop().time() < deadline, self.logs()
            await asyncio.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))

    def records(self, topic: str) -> list[Any]:
        full = full_name(self.settings.namespace, topic)
        return [record for p in range(self.bus.partitions(full)) for record in self.bus.read(full, p)]

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@asynccontextmanager
async def deployment(broker: str, folder: Path, collector: str) -> AsyncIterator[Machine]:
    """Topics, version 0 of a tiny model, tasks, and an engine that answers right every second time."""
    model = tiny_model.write_model(folder / "model")
    encode = ChatTokenizer(model).encode
    replies = cycle([encode("123<|im_end|>"), encode("321<|im_end|>")])
    (folder / "tasks.jsonl").write_text(
        "".join(
            json.dumps({"id": f"t{n}", "messages": [{"role": "user", "content": "312"}], "answer": "123"}) + "\n"
            for n in range(4)
        )
    )
    async with AsyncExitStack() as held:
        engine = await held.enter_async_context(serving(InstantEngine(lambda prompt: next(replies))))
        bus = held.enter_context(KafkaBus(broker))
        names = {"namespace": f"o{uuid.uuid4().hex[:10]}", "broker": broker, "engine": engine.url}
        file = folder / "millrace.toml"
        file.write_text(FILE.format(**names, port=free_ports(1)[0], collector=collector))
        settings = load(file)
        await asyncio.to_thread(bus.ensure_topics, settings.layout.specs())
        await asyncio.to_thread(version_zero.create, settings, model, bus)
        serves = {**status(0, url=engine.url), "expires_at": now_micros() + 600_000_000}
        with bus.publisher() as publisher:
            workers = Outgoing(full_name(settings.namespace, "workers"), b"k", codec.encode("WorkerStatus", serves))
            publisher.publish(workers).result(30)
        machine = Machine(folder, bus, settings)
        held.callback(machine.close)
        yield machine


STATIONS = ("gateway", "refine", "reward", "seal", "dispatch", "learn")


async def test_one_trajectory_is_one_trace_and_the_figures_have_units(broker: str, tmp_path: Path) -> None:
    with Collector() as collector:
        async with deployment(broker, tmp_path, collector.url) as machine:
            machine.start("learn", "refine", "reward", "seal", "dispatch", "gateway", "rollout")
            learner = machine.processes["learn"]
            await machine.until(lambda: learner.poll() is not None)
            assert learner.returncode == 0, machine.logs()
            await machine.until(lambda: "millrace.stage.lag" in collector.metrics["seal"])
            trained = {span.trace for span in collector.spans if span.name == "millrace.learn"}
            assert len(trained) == 2, "both samples of the group"
            # Processes that end all at once on a busy machine may have no time left for what was not sent yet.
            await machine.until(lambda: all(len(collector.traces()[trace]) >= len(STATIONS) for trace in trained))
            codes = await machine.stop()
            assert set(codes.values()) == {0}, f"{codes}\n{machine.logs()}"
            for trace in trained:
                check_trace(collector, trace)
                check_headers(machine, trace)
            check_metrics(collector)
            assert all(headers["authorization"] == "Bearer hunter2" for headers in collector.headers)


def check_trace(collector: Collector, trace: str) -> None:
    """One span a process, all below the one of the gateway, which is there for the whole episode."""
    spans = collector.traces()[trace]
    assert Counter(span.name for span in spans) == Counter(f"millrace.{name}" for name in STATIONS)
    assert all(span.name == f"millrace.{span.service}" for span in spans)
    assert len({span.instance for span in spans}) == len(STATIONS)
    (root,) = (span for span in spans if not span.parent)
    assert root.service == "gateway"
    assert {span.parent for span in spans if span is not root} == {root.id}
    assert all(span.start <= span.end for span in spans)
    assert root.end > root.start
    assert root.start < min(span.start for span in spans if span is not root)


def check_headers(machine: Machine, trace: str) -> None:
    """The context was in the Kafka headers all the way."""
    trajectory = str(uuid.UUID(trace)).encode()
    carried = HEADER
    for topic, count in (("raw", 4), ("events", 4), ("policy.trajectories", 1)):
        found = [r for r in machine.records(topic) if r.headers.get("trajectory") == trajectory]
        assert len(found) == count, topic
        assert all(record.headers[carried].split(b"-")[1] == trace.encode() for record in found), topic
    many = [r.headers[MANY].decode().split(",") for r in machine.records("policy.completions") if MANY in r.headers]
    (group,) = [contexts for contexts in many if trace in str(contexts)]
    assert len(group) == 2


UNITS = {
    "gateway": {"millrace.gateway.tokens": "{token}", "millrace.gateway.calls": "{call}"},
    "rollout": {"millrace.rollout.episodes": "{episode}"},
    "refine": {"millrace.stage.lag": "{offset}", "millrace.stage.commit": "s"},
    "reward": {"millrace.reward.verdicts": "{verdict}"},
    "seal": {"millrace.stage.lag": "{offset}"},
    "dispatch": {"millrace.dispositions": "{disposition}"},
    "learn": {
        "millrace.learner.step.time": "s",
        "millrace.learner.staleness": "{version}",
        "millrace.learner.tokens": "{token}",
        "millrace.learner.groups": "{group}",
    },
}


def check_metrics(collector: Collector) -> None:
    """Lag, staleness, step time, tokens and dispositions, with units and figures that can be."""
    for service, units in UNITS.items():
        found = collector.metrics[service]
        assert {name: found[name].unit for name in units} == units, service
    learn, dispatch = collector.metrics["learn"], collector.metrics["dispatch"]
    steps = {label(point, "phase"): point for point in learn["millrace.learner.step.time"].histogram.data_points}
    assert steps["step"].count == 1
    assert 0 < steps["step"].sum < PATIENCE_S
    assert 0.1 in steps["step"].explicit_bounds
    assert learn["millrace.learner.tokens"].sum.data_points[0].as_double > 0
    assert collector.metrics["gateway"]["millrace.gateway.tokens"].sum.data_points[0].as_int >= 8
    ends = {(label(point, "topic"), label(point, "end")) for point in dispatch["millrace.dispositions"].sum.data_points}
    assert ("policy.resolutions", "ready") in ends


def label(point: Any, name: str) -> str:
    return next(str(pair.value.string_value) for pair in point.attributes if pair.key == name)


@pytest.mark.parametrize("fault", ["silent", "dead"])
async def test_a_collector_that_does_not_answer_holds_nobody_up(broker: str, tmp_path: Path, fault: str) -> None:
    """Everything happens while the first exports are still held, or refused: serving, the stages, and leaving."""
    with Collector(silent=True) as collector:
        url = collector.url if fault == "silent" else f"http://{LOCALHOST}:{free_ports(1)[0]}"
        async with deployment(broker, tmp_path, url) as machine, httpx.AsyncClient(timeout=60) as http:
            began = time.monotonic()
            machine.start("gateway", "refine")
            base = f"http://{LOCALHOST}:{machine.settings.gateway.port}"

            async def answers() -> bool:
                try:
                    return (await http.get(f"{base}/health")).status_code == 200
                except httpx.TransportError:
                    return False

            while not await answers():
                assert machine.processes["gateway"].poll() is None, machine.logs()
                await asyncio.sleep(0.1)
            if fault == "silent":
                await machine.until(lambda: collector.asked >= 2)
            for _ in range(50):
                session = (await http.post(f"{base}/v1/sessions", json={})).json()
                who = {"authorization": f"Bearer {session['api_key']}"}
                body = {"model": "m", "messages": [{"role": "user", "content": "312"}]}
                assert (await http.post(f"{base}/v1/chat/completions", json=body, headers=who)).status_code == 200
                ended = await http.post(f"{base}/v1/sessions/{session['session']}/end", json={}, headers=who)
                assert ended.status_code == 200, ended.text
            events = lambda: [r for r in machine.records("events") if r.headers.get("kind") == b"episode_ended"]  # noqa: E731
            await machine.until(lambda: len(events()) == 50)
            assert await machine.stop() == {"gateway": 0, "refine": 0}, machine.logs()
            said = (machine.folder / "refine.log").read_text()
            assert "Traceback" not in said
            assert said.count("opentelemetry") <= len(LOGGERS) * (1 + (time.monotonic() - began) // QUIET_S)
            assert collector.spans == []
