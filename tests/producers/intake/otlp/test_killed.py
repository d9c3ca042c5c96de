"""The receiver as a process that is killed under load, again and again: each call that was answered 200 is in the
events once. And on a real broker, from the SDK to `raw`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import httpx
import pytest

from millrace.infra.config import load, variables
from millrace.infra.connect import connect
from millrace.infra.process.net import LOCALHOST, free_ports, is_listening, wait_until
from millrace.producers.capture.log import CaptureLog
from millrace.schemas import codec
from tests.support.imported import traced
from tests.support.otlp_process import KEY, made
from tests.support.spans import a_call, a_span

pytestmark = pytest.mark.slow
CLIENTS, CALLS, KILLS = 4, 40, 4
PATIENCE_S = 120


def test_each_answered_span_is_an_event_once(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tests.support.otlp_process", str(tmp_path), str(port), "0.2"]
    output = (tmp_path / "output.log").open("ab")
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        processes.append(subprocess.Popen(command, stdout=output, stderr=output))
        wait_until(lambda: is_listening(LOCALHOST, port), "the receiver", PATIENCE_S)

    answered: list[str] = []
    turn = threading.Semaphore(0)

    def client(number: int) -> None:
        """Sends each span until it is answered, as an exporter does."""
        for call in range(CALLS):
            id = number * CALLS + call + 1
            span = a_span(id, a_call("q", "a", f"r{id}"), trace=f"{id // 3 + 1:032x}")
            while True:
                try:
                    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
                    url = f"http://{LOCALHOST}:{port}/v1/traces"
                    answer = httpx.post(url, content=json.dumps(traced([span])), headers=headers, timeout=30)
                    if answer.status_code == 200:
                        break
                except httpx.HTTPError:
                    continue
            answered.append(f"r{id}")
            turn.release()

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    try:
        start()
        for one in clients:
            one.start()
        for _ in range(KILLS):
            for _ in range(CLIENTS * CALLS // (KILLS + 1)):
                turn.acquire(timeout=PATIENCE_S)
            processes[-1].send_signal(signal.SIGKILL)
            processes[-1].wait()
            start()
        for one in clients:
            one.join(PATIENCE_S)
            assert not one.is_alive()
    finally:
        processes[-1].terminate()
        assert processes[-1].wait(PATIENCE_S) == 0
        output.close()
    receiver = made(tmp_path, 0.2)
    receiver.close_due(ends_all=True)
    receiver.close()
    log = CaptureLog(tmp_path / "events")
    events = [codec.decode_as("Event", kept.entry.value) for kept in log.read()]
    log.close()
    bodies = [codec.decode_body("model_call", one["body"]) for one in events if one["kind"] == "model_call"]
    found = Counter(json.loads(dict(body)["response"])["id"] for body in bodies)
    assert len(answered) == CLIENTS * CALLS
    assert found == Counter(answered)
    assert len({one["id"] for one in events}) == len(events)


@pytest.mark.kafka
def test_from_the_sdk_to_raw(broker: str, tmp_path: Path) -> None:
    """`millrace otlp` as it runs alone: its key, its heartbeat, its events in the topic, and the end on SIGTERM."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    (port,) = free_ports(1)
    flags = {
        "home": str(tmp_path / "home"),
        "namespace": f"otlp{os.getpid()}",
        "kafka.bootstrap": broker,
        "kafka.local": "false",
        "otlp.port": str(port),
        "otlp.quiet_s": "0.5",
        "gateway.keys": {"shop": {"key": KEY, "tenant": "acme"}},
    }
    settings = load(flags=flags)
    command = [sys.executable, "-P", "-m", "millrace.apps.cli.main", "otlp"]
    with connect(settings) as bus:
        bus.ensure_topics(settings.layout.specs())
        with (tmp_path / "output.log").open("ab") as output:
            process = subprocess.Popen(
                command, env={**os.environ, **variables(flags)}, stdout=output, stderr=output, cwd=tmp_path
            )
            try:
                wait_until(lambda: is_listening(LOCALHOST, port), "the receiver", PATIENCE_S)
                provider = TracerProvider()
                url, headers = f"http://{LOCALHOST}:{port}/v1/traces", {"authorization": f"Bearer {KEY}"}
                provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(url, headers=headers)))
                with provider.get_tracer("test").start_as_current_span("chat m", attributes=a_call("q", "a", "r1")):
                    pass
                provider.shutdown()
                raw = f"{settings.namespace}.raw"

                def events() -> list[dict[str, object]]:
                    records = [one for part in range(bus.partitions(raw)) for one in bus.read(raw, part)]
                    return [dict(codec.decode_as("Event", one.value or b"")) for one in records]

                kinds = ["episode_started", "model_call", "episode_ended"]
                wait_until(lambda: [one["kind"] for one in events()] == kinds, "the episode in raw", PATIENCE_S)
                assert {one["tenant"] for one in events()} == {"acme"}
                workers = [
                    codec.decode_as("WorkerStatus", one.value or b"")
                    for one in bus.read(f"{settings.namespace}.workers", 0)
                ]
                assert {(one["role"], one["state"]) for one in workers} >= {("otlp", "serving")}
            finally:
                process.terminate()
                assert process.wait(PATIENCE_S) == 0
