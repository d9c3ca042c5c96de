"""Processes say that they live, and a gateway that served before needs no log to serve again."""

from __future__ import annotations

import threading
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from infra.bus.base import Outgoing, TopicSpec
from infra.bus.memory import MemoryBus
from infra.config import load
from infra.errors import ConfigError, UnreachableError
from producers.gateway.serve import context_of, find_model, make_renderer
from producers.heartbeat import Heartbeat
from schemas import codec
from schemas.ids import now_micros
from tests.support import chat_tokenizer


def test_a_heart_beats_and_stops():
    bus = MemoryBus()
    bus.ensure_topics([TopicSpec("t.workers", 1)])
    beat = Heartbeat(bus, "t", worker="w", role="rollout", policy="p")
    beat.start()
    deadline = time.monotonic() + 10
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


def test_unknown_renderers_are_named(tmp_path: Path):
    settings = load(flags={"home": str(tmp_path), "gateway.renderer": "harmony"})
    with pytest.raises(ConfigError, match="'harmony' is not supported"):
        make_renderer(settings, {})
