"""An engine with a key: who brings none gets nothing but the health check, on every route."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from millrace.infra.config import load
from millrace.infra.engines.base import Sampling
from millrace.infra.engines.inprocess.control import InprocessControl
from millrace.infra.engines.key_check import KEY, REFUSAL, KeyCheck
from millrace.infra.engines.kinds import open_engine
from millrace.infra.engines.vllm.control import VllmControl
from millrace.infra.engines.vllm.engine import VllmEngine
from millrace.infra.engines.vllm.launch import Vllm
from millrace.infra.errors import ConfigError, EngineError, EngineRejected
from millrace.infra.machine.local import run_engine
from tests.support.engines import LightEngine, complete
from tests.support.fake_http import FakeServer, answer, serving, stream
from tests.support.tiny_model import write_model

WORD = "a long random word"
REPLY = (
    b'data: {"choices": [{"index": 0, "token_ids": [4], "finish_reason": "stop", '
    b'"logprobs": {"content": [{"token_id": 4, "logprob": -0.5, "rank": 1, "top_logprobs": []}]}, '
    b'"weight_versions": [{"version": "p@3", "start": 0, "end": 1}]}]}\n\n',
    b"data: [DONE]\n\n",
)


@pytest.mark.parametrize(
    ("path", "given", "status"),
    [
        ("/collective_rpc", None, 401),
        ("/collective_rpc", "Bearer another", 401),
        ("/collective_rpc", WORD, 401),
        ("/inference/v1/generate", None, 401),
        ("/none", None, 401),
        ("/collective_rpc", f"Bearer {WORD}", 200),
        ("/none", f"Bearer {WORD}", 404),
        ("/health", None, 200),
    ],
)
async def test_only_the_key_opens_and_health_is_open(
    path: str, given: str | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(request: Request) -> Response:
        return PlainTextResponse("done")

    monkeypatch.setenv(KEY, WORD)
    routes = [Route(name, answer) for name in ("/collective_rpc", "/inference/v1/generate", "/health")]
    transport = httpx.ASGITransport(KeyCheck(Starlette(routes=routes)))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        got = await client.get(path, headers={"authorization": given} if given else {})
    assert got.status_code == status
    if status == 401:
        assert got.json()["error"]["code"] == "wrong_key"


def test_vllm_gets_the_key_by_its_environment_alone(tmp_path: Path) -> None:
    one = Vllm(tmp_path, "http://127.0.0.1:1", "m", "tiny", device="cuda", key=WORD)
    words = " ".join(one.command())
    assert "--middleware millrace.infra.engines.key_check.KeyCheck" in words
    assert WORD not in words
    assert one.environment()[KEY] == WORD
    bare = Vllm(tmp_path, "http://127.0.0.1:1", "m", "tiny", device="cuda")
    assert "--middleware" not in bare.command()
    assert KEY not in bare.environment()


def test_an_engine_beyond_this_machine_needs_a_key(tmp_path: Path) -> None:
    flags = {"home": str(tmp_path), "engine.url": "http://10.0.0.6:8901", "engine.local": "false"}
    with pytest.raises(ConfigError, match=r"set \[engine\] key"):
        run_engine(load(flags=flags))


def brought(fake: FakeServer) -> list[str]:
    """The key of each request that came."""
    heads = [dict(line.split(": ", 1) for line in head.split("\r\n") if ": " in line) for head, _ in fake.requests]
    return [{name.lower(): value for name, value in head.items()}.get("authorization", "") for head in heads]


async def test_a_key_that_is_made_later_is_read_upon_a_refusal(tmp_path: Path) -> None:
    key = tmp_path / "key"

    def read() -> str:
        return key.read_text() if key.is_file() else ""

    played = answer(REFUSAL, 401), stream(*REPLY), stream(*REPLY), answer(REFUSAL, 401), answer(b"{}"), answer(b"{}")
    async with serving(*played) as fake:
        engine, control = VllmEngine(fake.url, api_key=read, patience_s=0), VllmControl(fake.url, key=read)
        key.write_text(WORD)
        try:
            for _ in range(2):
                assert len(await complete(engine, [1], Sampling(max_tokens=1))) == 1
            await control.pause()
            await control.resume()
        finally:
            await engine.close()
            await control.close()
        right = f"Bearer {WORD}"
        assert brought(fake) == ["", right, right, "", right, right]


async def test_a_key_that_stays_the_same_is_brought_once() -> None:
    async with serving(answer(REFUSAL, 401)) as fake:
        engine, control = VllmEngine(fake.url, api_key=lambda: "another"), VllmControl(fake.url, key="another")
        try:
            with pytest.raises(EngineRejected, match="wrong or missing key"):
                await complete(engine, [1], Sampling(max_tokens=1))
            with pytest.raises(EngineRejected, match="wrong or missing key"):
                await control.pause()
        finally:
            await engine.close()
            await control.close()
        assert brought(fake) == ["Bearer another"] * 2


@pytest.mark.slow
async def test_gateway_and_reloader_bring_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, WORD)
    light = LightEngine(write_model(tmp_path / "model", seed=0), tmp_path / "log")
    light.start()
    try:
        for key, let_in in ((WORD, True), ("another", False), ("", False)):
            engine, control = (
                open_engine("inprocess", light.url, resubmits=False, key=key),
                InprocessControl(light.url, key=key),
            )
            try:
                if let_in:
                    assert (await control.state()).incarnation
                    await control.pause()
                    await control.resume()
                    assert len(await complete(engine, [1], Sampling(max_tokens=2))) == 1
                else:
                    with pytest.raises((EngineRejected, EngineError)):
                        await control.state()
                    with pytest.raises(EngineRejected):
                        await complete(engine, [1], Sampling(max_tokens=2))
            finally:
                await engine.close()
                await control.close()
    finally:
        light.kill()
