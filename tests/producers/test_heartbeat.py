"""Processes say that they live, and a gateway that served before needs no log to serve again."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as few
from hypothesis import strategies as st

from millrace.infra.config import load
from millrace.infra.errors import ConfigError, UnreachableError
from millrace.infra.heartbeat import Heartbeat
from millrace.infra.log.base import Outgoing, TopicSpec
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.memory.bus import MemoryBus
from millrace.producers.gateway.calls import policy_joining as module
from millrace.producers.gateway.calls.policy_joining import (
    NotYet,
    context_of,
    find_model,
    first,
    joining,
    make_renderer,
)
from millrace.schemas import bounds, codec
from millrace.schemas.ids import now_micros
from tests.support import chat_tokenizer, logged
from tests.support.gateway_world import ScriptedEngine
from tests.support.odd import records
from tests.support.versions import weights

PRICES = {"prompt": 1.0, "completion": 2.0}


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
    found = find_model(settings, bus)
    assert make_renderer(settings, found).tokenizer_hash == "tok"

    def down(*_: Any, **__: Any) -> Any:
        raise UnreachableError("down")

    monkeypatch.setattr(bus, "read", down)
    assert find_model(settings, bus) == found
    assert context_of(folder) == 1 << 20
    (folder / "config.json").write_text('{"max_position_embeddings": 64}')
    assert context_of(folder) == 64
    with pytest.raises(NotYet, match="the log does not answer"):
        find_model(load(flags={"namespace": "t", "home": str(tmp_path / "x")}), bus)


async def test_a_gateway_serves_every_policy_that_is_there_and_names_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = {"engine_urls": ["http://far.test/"], "renderer": "template", "max_model_len": 32, "prices": PRICES}
    flags = {"namespace": "t", "home": str(tmp_path), "gateway.policies": {"small": told, "none": {}}}
    settings = load(flags=flags)
    folder = chat_tokenizer.write(tmp_path / "v0")
    bus = MemoryBus()
    bus.ensure_topics([TopicSpec("t.small.weights", 1)])
    said = {"policy": "small", "uri": f"file://{folder}", "tokenizer_hash": "tok", "template_hash": "tem"}
    version = {**weights(0, "d"), **said}
    with bus.publisher() as publisher:
        publisher.publish(Outgoing("t.small.weights", b"small", codec.encode("WeightVersion", version))).result(5)
    opened: list[str] = []

    def make(url: str, **_: Any) -> ScriptedEngine:
        opened.append(url)
        return ScriptedEngine(lambda *_: [])

    bus.ensure_topics([TopicSpec("t.policy.weights", 1)])
    waiting = joining(settings, make, 0.0)
    (served,) = await first(waiting, bus, asyncio.Event())
    assert (served.policy, served.renderer.tokenizer_hash, served.max_model_len) == ("small", "tok", 32)
    assert (served.fleet.policy, opened[1:], served.prices) == ("small", ["http://far.test"], (1.0, 2.0, 1.0))
    assert [path.name for path in (settings.gateway.capture_dir / "policies").iterdir()] == ["small"]
    said = logged.lines(caplog, "millrace.producers.gateway")
    assert len(said) == 2
    assert "policy policy has no version yet: `millrace policy create`" in said[0]
    assert "policy none is not served yet: its topics were never made" in said[1]
    assert "t.none.weights" in said[1]
    assert "`millrace topics` makes them" in said[1]
    stopped = asyncio.Event()
    stopped.set()
    assert await first(waiting, bus, stopped) == []


def test_a_gateway_finds_its_model_past_anything_else(tmp_path: Path):
    settings = load(flags={"namespace": "t", "home": str(tmp_path)})
    folder = chat_tokenizer.write(tmp_path / "v0")
    odd: dict[str, Any] = dict(weights(0, "d"), policy="policy")
    claim = ClaimStore(str(tmp_path / "claims")).store("Progress", b"elsewhere")
    values: list[bytes | None] = [None, b"", b"torn", codec.MARK + b"short", codec.encode("Claim", claim)]
    uris = ("", "/", "x" * 5000, "file://[", "a\x00b", "../../x", f"file://{tmp_path}/gone", "s3://there/v0")
    values += [codec.encode("WeightVersion", {**odd, "uri": uri}) for uri in uris]
    values += [codec.encode("WeightVersion", {**odd, "uri": str(folder), **over}) for over in ELSEWHERE]
    bus = MemoryBus()
    bus.ensure_topics([TopicSpec("t.policy.weights", 1)])
    with bus.publisher() as publisher:
        for value in [*values, codec.encode("WeightVersion", {**odd, "uri": f"file://{folder}"})]:
            publisher.publish(Outgoing("t.policy.weights", b"p", value)).result(5)
    found = find_model(settings, bus)
    assert (found["uri"], found["tokenizer_hash"]) == (str(folder), odd["tokenizer_hash"])


ELSEWHERE: list[dict[str, Any]] = [
    {"policy": "another", "tokenizer_hash": "another"},
    {"tokenizer_hash": "x" * (bounds.NAME_BYTES + 1)},
    {"version": -1, "tokenizer_hash": "before the first"},
    {"eta": 2**31 - 1, "tokenizer_hash": "beyond"},
]


@few(max_examples=20)
@given(st.lists(records("WeightVersion"), max_size=3))
def test_no_record_of_versions_ends_the_search(drawn: list[dict[str, Any]]):
    bus = MemoryBus()
    bus.ensure_topics([TopicSpec("t.p.weights", 1)])
    with bus.publisher() as publisher:
        for one in drawn:
            publisher.publish(Outgoing("t.p.weights", b"p", codec.encode_by_name("WeightVersion", one))).result(5)
    with tempfile.TemporaryDirectory() as home:
        settings = load(flags={"namespace": "t", "policy.name": "p", "home": home})
        if any(one["policy"] == "p" for one in drawn):
            with suppress(NotYet):  # a version that nobody could read is none
                find_model(settings, bus)
        else:
            with pytest.raises(NotYet, match="has no version yet"):
                find_model(settings, bus)


async def test_a_gateway_that_never_served_says_once_that_the_log_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    settings = load(flags={"namespace": "t", "home": str(tmp_path)})
    bus, stop, asked = MemoryBus(), asyncio.Event(), 0

    def down(*_: Any, **__: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 3:
            stop.set()
        raise UnreachableError(f"no broker answered after {asked} ms")

    monkeypatch.setattr(bus, "read", down)
    monkeypatch.setattr(module, "FIRST_LOOK_S", 0.0)
    waiting = joining(settings, lambda url, **_: ScriptedEngine(lambda *_: []), 0.0)
    assert await first(waiting, bus, stop) == []
    (said,) = logged.lines(caplog, "millrace.producers.gateway")
    assert "the log does not answer" in said
    assert "no broker answered" in said


def test_unknown_renderers_are_named(tmp_path: Path):
    settings = load(flags={"home": str(tmp_path), "gateway.renderer": "harmony"})
    with pytest.raises(ConfigError, match="'harmony' is not supported"):
        make_renderer(settings, {})
