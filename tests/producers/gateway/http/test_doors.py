"""Who may come in, how much of it at once, and what is told to those who cannot be served now."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.config.keys import WORKERS
from millrace.infra.engines.vllm.engine import VllmEngine
from millrace.infra.errors import EngineError, EngineTimeout, EngineUnavailable
from millrace.schemas import bounds
from tests.support import logged
from tests.support.fake_http import answer, serving
from tests.support.gateway_world import ScriptedEngine, World, world
from tests.support.in_process import InProcess, Played

USER = {"role": "user", "content": "hi"}
CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "m", "messages": [USER]}).encode()
KEYS = {"sk-one": "one", "sk-two": "two"}
ONE = {"authorization": "Bearer sk-one"}


def make_engine(renderer: TemplateRenderer) -> ScriptedEngine:
    return ScriptedEngine(lambda *_: renderer.tokenizer.encode("The answer is 42.<|im_end|>"))


async def until(done: Any, what: str) -> None:
    for _ in range(6000):
        if done():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(what)


# ---------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_ends_its_call(tmp_path: Path, renderer: TemplateRenderer, streamed: bool) -> None:
    engine = make_engine(renderer)
    async with world(tmp_path, renderer, engine) as w:
        session = await w.start()
        engine.gate = asyncio.Semaphore(0)
        calling = asyncio.create_task(w.chat([USER], session["api_key"], stream=streamed))
        await until(lambda: engine.asked, "the engine is asked")
        calling.cancel()
        await until(lambda: engine.left_early, "the engine is left")
        await until(lambda: w.calls(), "the call is recorded")
        (call,) = w.calls()
        assert (call["finish_reason"], call["trainable"], call["untrainable_reason"]) == ("abort", False, "aborted")
        engine.gate = None
        assert (await w.chat([USER], session["api_key"], stream=streamed)).status_code == 200
        assert w.calls()[1]["supersedes"] == call["response_id"]


async def test_a_client_that_leaves_in_its_body_leaves_no_trace(
    tmp_path: Path, renderer: TemplateRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = InProcess(tmp_path, renderer, lambda _: Played(500))
    for cut in range(0, len(BODY), 7):
        got = await gateway.ask("POST", CHAT, [BODY[:cut]], leave=True)
        assert got.status in (0, 400)
    assert (gateway.log.end, gateway.sessions.live) == (0, {})
    assert not [record for record in logged.records(caplog) if record.exc_info]
    await gateway.close()


# ---------------------------------------------------------------------- bodies and counts


async def test_nobody_without_a_key_sends_a_body(tmp_path: Path, renderer: TemplateRenderer) -> None:
    gateway = InProcess(tmp_path, renderer, lambda _: Played(500), keys=KEYS)
    for path in (CHAT, "/v1/sessions", "/v1/sessions/x/end"):
        read = 0

        async def receive() -> dict[str, Any]:
            nonlocal read
            read += 1
            return {"type": "http.request", "body": b"x", "more_body": True}

        sent: list[dict[str, Any]] = []

        async def send(message: Any, sent: list[dict[str, Any]] = sent) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "root_path": ""}
        await gateway.app({**scope, "scheme": "http", "server": ("127.0.0.1", 1), "http_version": "1.1"}, receive, send)
        assert (sent[0]["status"], read) == (401, 0)
    await gateway.close()


async def dribble(world: World, seconds: float) -> bytes:
    """A body that never ends."""
    port = int(world.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000\r\n\r\n{{"
    writer.write(head.encode())
    try:
        return await asyncio.wait_for(reader.read(), seconds)
    finally:
        writer.close()


async def test_a_slow_body_is_closed(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with world(tmp_path, renderer, make_engine(renderer), body_timeout_s=1.0) as w:
        got = await dribble(w, 60)
        assert got.startswith(b"HTTP/1.1 408")
        assert b"request_timeout" in got
        assert (await w.chat([USER])).status_code == 200


async def test_bodies_in_flight_have_a_bound_together(tmp_path: Path, renderer: TemplateRenderer) -> None:
    engine = make_engine(renderer)
    async with world(tmp_path, renderer, engine, max_bodies_bytes=4000) as w:
        engine.gate = asyncio.Semaphore(0)
        large = {"role": "user", "content": "x" * 1500}
        waiting = [asyncio.create_task(w.chat([large, USER], max_tokens=5)) for _ in range(2)]
        await until(lambda: len(engine.asked) == 2, "two are in flight")
        refused = await w.chat([large])
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "busy")
        assert refused.headers["retry-after"] == "1"
        engine.gate = None
        for task in waiting:
            task.cancel()
        await until(lambda: engine.left_early == 2, "their clients are gone")
        assert (await w.chat([large])).status_code == 200


async def test_each_tenant_has_its_own_room(tmp_path: Path, renderer: TemplateRenderer) -> None:
    engine = make_engine(renderer)
    async with world(tmp_path, renderer, engine, keys=KEYS, max_in_flight=2, max_sessions=3) as w:
        engine.gate = asyncio.Semaphore(0)
        waiting = [asyncio.create_task(w.chat([{**USER, "content": str(n)}], "sk-one")) for n in range(2)]
        await until(lambda: len(engine.asked) == 2, "two are in flight")
        refused = await w.chat([USER], "sk-one")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
        assert (await w.http.get("/health")).json() == {"status": "ok"}
        gate, engine.gate = engine.gate, None
        assert (await w.chat([USER], "sk-two")).status_code == 200
        for _ in range(100):
            gate.release()
        assert [task.status_code for task in await asyncio.gather(*waiting)] == [200, 200]
        assert (await w.http.post("/v1/sessions", json={}, headers=ONE)).status_code == 200
        for path, body in ((CHAT, {"model": "m", "messages": [USER]}), ("/v1/sessions", {})):
            refused = await w.http.post(path, json=body, headers=ONE)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_sessions")


async def test_a_rate_is_kept(tmp_path: Path, renderer: TemplateRenderer) -> None:
    gateway = InProcess(tmp_path, renderer, lambda _: Played(500), keys=KEYS, max_rate=0.001 + 5)
    statuses = [(await gateway.ask("GET", "/v1/models", headers=ONE)).status for _ in range(50)]
    assert statuses[:5] == [200] * 5
    assert 429 in statuses
    await gateway.close()


async def test_a_large_header_block_is_refused(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with world(tmp_path, renderer, make_engine(renderer)) as w:
        got = await w.http.get("/health", headers={"x-large": "x" * (bounds.HEADER_BYTES * 2)})
        assert got.status_code == 431
        assert (await w.http.get("/health", headers={"x-small": "x" * 8000})).status_code == 200


# ---------------------------------------------------------------------- who asks


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.test"},
        {"origin": "null"},
        {"host": "evil.test"},
        {"host": "evil.test:8900"},
        {"host": "10.0.0.1:8900"},
        {"host": "[::1"},
        {"origin": "http://127.0.0.1.evil.test"},
    ],
)
async def test_without_keys_no_page_from_elsewhere_is_served(
    tmp_path: Path, renderer: TemplateRenderer, headers: dict[str, str]
) -> None:
    gateway = InProcess(tmp_path, renderer, lambda _: Played(500))
    for method, path in (("POST", CHAT), ("POST", "/v1/sessions"), ("GET", "/health"), ("GET", "/v1/models")):
        got = await gateway.ask(method, path, BODY, {"content-type": "text/plain", **headers})
        assert (got.status, got.json["error"]["code"]) == (403, "foreign_origin")
    for local in ("localhost:8900", "127.0.0.1", "[::1]:8900"):
        origin = {"origin": f"http://{local}"}
        assert (await gateway.ask("GET", "/health", headers={"host": local, **origin})).status == 200
    await gateway.close()
    gateway = InProcess(tmp_path, renderer, lambda _: Played(500), keys=KEYS)
    assert (await gateway.ask("GET", "/v1/models", headers={**headers, **ONE})).status == 200
    await gateway.close()


async def test_health_tells_strangers_nothing(tmp_path: Path, renderer: TemplateRenderer) -> None:
    gateway = InProcess(tmp_path, renderer, lambda _: Played(500), keys=KEYS)
    for stranger in ({}, {"authorization": "Bearer wrong"}):
        assert (await gateway.ask("GET", "/health", headers=stranger)).json == {"status": "ok"}
    for known in (ONE, {"authorization": "bearer sk-one"}):
        assert "engines" in (await gateway.ask("GET", "/health", headers=known)).json
    await gateway.close()


async def test_health_tells_a_tenant_of_itself_alone(tmp_path: Path, renderer: TemplateRenderer) -> None:
    keys = {**KEYS, "sk-workers": WORKERS}
    gateway = InProcess(tmp_path, renderer, lambda _: Played(500), keys=keys, rollout_key="sk-workers")

    async def health(key: str) -> dict[str, Any]:
        return (await gateway.ask("GET", "/health", headers={"authorization": f"Bearer {key}"})).json

    async def start(key: str) -> str:
        headers = {"authorization": f"Bearer {key}"}
        return str((await gateway.ask("POST", "/v1/sessions", b"{}", headers)).json["api_key"])

    mine = await start("sk-one")
    before = [await health(key) for key in ("sk-one", mine)]
    assert before == [before[0]] * 2
    assert before[0].keys() == {"status", "policies", "sessions", "engines", "capture"}
    assert all(engine.keys() == {"version"} for engine in before[0]["engines"].values())
    for key in ("sk-two", "sk-workers", "sk-two"):
        theirs = await start(key)
        await gateway.ask("POST", CHAT, BODY, {"authorization": f"Bearer {theirs}"})
        gateway.gateway.recorder.lost["model_call"] += 1
        assert [await health(key) for key in ("sk-one", mine)] == before
    assert [(await health(key))["sessions"] for key in ("sk-one", "sk-two", "sk-workers")] == [1, 2, 4]
    assert (await health("sk-workers"))["lost"] == {"model_call": 3}
    await gateway.close()


@pytest.mark.parametrize("keys", [{}, {"sk-one": "one"}, {"sk-one": "one", "sk-workers": WORKERS}])
async def test_health_tells_everything_where_there_is_one_tenant(
    tmp_path: Path, renderer: TemplateRenderer, keys: dict[str, str]
) -> None:
    gateway = InProcess(tmp_path, renderer, lambda _: Played(500), keys=keys)
    assert {"lost", "captured", "unreadable"} <= (await gateway.ask("GET", "/health", headers=ONE)).json.keys()
    await gateway.close()


# ---------------------------------------------------------------------- engines in trouble


@pytest.mark.parametrize(
    ("error", "status", "code", "wait"),
    [
        (EngineUnavailable("http://10.0.0.1:8901 failed (429)", status=429, retry_after_s=7), 429, "engine_busy", "7"),
        (EngineUnavailable("http://10.0.0.1:8901 failed (503)", status=503), 503, "engine_unavailable", "1"),
        (EngineUnavailable("cannot connect to http://10.0.0.1:8901"), 502, "engine_unavailable", "1"),
        (EngineTimeout("http://10.0.0.1:8901 sent nothing for 600 s"), 504, "engine_timeout", None),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_engine_trouble_is_told_well(
    tmp_path: Path,
    renderer: TemplateRenderer,
    error: EngineError,
    status: int,
    code: str,
    wait: str | None,
    streamed: bool,
) -> None:
    engine = make_engine(renderer)
    async with world(tmp_path, renderer, engine) as w:
        engine.error = error
        got = await w.chat([USER], stream=streamed)
        assert (got.status_code, got.json()["error"]["code"], got.headers.get("retry-after")) == (status, code, wait)
        assert "10.0.0.1" not in got.text
        assert (w.events(), w.gateway.sessions.live) == ([], {})


@pytest.mark.parametrize("status", [429, 503])
async def test_the_client_of_engines_tells_busy_from_gone(status: int) -> None:
    async with serving(answer(b"{}", status)) as fake:
        engine = VllmEngine(fake.url, patience_s=0)
        with pytest.raises(EngineUnavailable) as caught:
            await engine._send(b"{}")
        assert caught.value.status == status
        await engine.close()


async def test_no_engine_in_time_names_no_address(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with world(tmp_path, renderer, make_engine(renderer), patience_s=0.1) as w:
        session = await w.start(ticket=1, min_version=3)
        got = await w.chat([USER], session["api_key"])
        assert got.status_code == 503
        assert "http" not in got.json()["error"]["message"]


async def test_a_call_that_is_cut_off_by_the_end_of_its_session_says_so(
    tmp_path: Path, renderer: TemplateRenderer
) -> None:
    engine = make_engine(renderer)
    async with world(tmp_path, renderer, engine) as w, aiohttp.ClientSession() as http:
        session = await w.start()
        engine.gate = asyncio.Semaphore(0)
        calling = asyncio.create_task(w.chat([USER], session["api_key"]))
        await until(lambda: engine.asked, "the engine is asked")
        await http.post(f"{w.url}/v1/sessions/{session['session']}/end", json={})
        got = await calling
        assert (got.status_code, got.json()["error"]["code"]) == (503, "cut_off")
