"""Processes say that they live, and a gateway that served before needs no log to serve again."""

from __future__ import annotations

import threading
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from millrace.infra.config import load
from millrace.infra.errors import ConfigError, UnreachableError
from millrace.infra.heartbeat import Heartbeat
from millrace.infra.log.base import Outgoing, TopicSpec
from millrace.infra.log.memory.bus import MemoryBus
from millrace.producers.gateway.serve import context_of, find_model, make_renderer
from millrace.schemas import codec
from millrace.schemas.ids import now_micros
from tests.support import chat_tokenizer


def test_a_heart_beats_and_stops():
    bus = MemoryBus()
    bus.ensure_topics([TopicSpec("t.workers", 1)])
    beat = Heartbeat(bus, "t", worker="w", role="rollout", policy="p")
    beat.start()
    deadline = time.monotonic() + 60
    while not list(bus.read("t.workers", 0)) and time.monotonic() < deadline:
        time.sleep(0.01)
    beat.close(10)
    found = [codec.decode_as("WorkerStatus", record.value or b"") for record in bus.read("t.workers", 0)]
    assert [state for state, _ in groupby(status["state"] for status in found)] == ["serving", "stopped"]
    assert found[0]["expires_at"] > now_micros()
    assert len({status["incarnation"] for status in found}) == 1


def test_a_gateway_finds_its_model_and_remembers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = load(flags={"namespace": "t", "home": str(tmp_path)})
    folder = chat_tokenizer.write(tmp_path / "v0")
    bus = MemoryBus()
    bus.ensure_topics([TopicSpec("t.policy.weights", 1)])
    version = {
        "policy": "policy", "version": 0, "parent": None, "mode": "full", "uri": f"file://{folder}", "digest": "",
        "files": {}, "tokenizer_hash": "tok", "template_hash": "tem", "seq_lo": 0, "seq_hi": 0, "batch": 1, "eta": 1,
        "shards": 1, "group_size": 1, "time": 0,
    }  # fmt: skip
    with bus.publisher() as publisher:
        publisher.publish(Outgoing("t.policy.weights", b"p", codec.encode("WeightVersion", version))).result(5)
    found = find_model(settings, bus, threading.Event())
    assert found is not None
    assert make_renderer(settings, found).tokenizer_hash == "tok"

    def down(*_: Any, **__: Any) -> Any:
        raise UnreachableError("down")

    monkeypatch.setattr(bus, "read", down)
    assert find_model(settings, bus, threading.Event()) == found
    assert context_of(folder) == 1 << 20
    (folder / "config.json").write_text('{"max_position_embeddings": 64}')
    assert context_of(folder) == 64
    stopped = threading.Event()
    stopped.set()
    assert find_model(load(flags={"namespace": "t", "home": str(tmp_path / "x")}), bus, stopped) is None


def test_a_gateway_that_never_served_says_that_the_log_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    settings = load(flags={"namespace": "t", "home": str(tmp_path)})
    bus, stop, asked = MemoryBus(), threading.Event(), 0

    def down(*_: Any, **__: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 3:
            stop.set()
        raise UnreachableError(f"no broker answered after {asked} ms")

    monkeypatch.setattr(bus, "read", down)
    assert find_model(settings, bus, stop) is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert "the log does not answer" in said
    assert "no broker answered" in said


def test_unknown_renderers_are_named(tmp_path: Path):
    settings = load(flags={"home": str(tmp_path), "gateway.renderer": "harmony"})
    with pytest.raises(ConfigError, match="'harmony' is not supported"):
        make_renderer(settings, {})
