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
from millrace.infra.engines.keyed import KEY, Keyed
from millrace.infra.engines.vllm.control import VllmControl
from millrace.infra.engines.vllm.launch import Vllm
from millrace.infra.errors import ConfigError, EngineError, EngineRejected
from millrace.infra.machine.local import run_engine
from millrace.producers.gateway.serve import make_engine
from tests.support.engines import LightEngine, complete
from tests.support.tiny_model import write_model

WORD = "a long random word"


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
    transport = httpx.ASGITransport(Keyed(Starlette(routes=routes)))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        got = await client.get(path, headers={"authorization": given} if given else {})
    assert got.status_code == status
    if status == 401:
        assert got.json()["error"]["code"] == "wrong_key"


def test_vllm_gets_the_key_by_its_environment_alone(tmp_path: Path) -> None:
    one = Vllm(tmp_path, "http://127.0.0.1:1", "m", "tiny", device="cuda", key=WORD)
    words = " ".join(one.command())
    assert "--middleware millrace.infra.engines.keyed.Keyed" in words
    assert WORD not in words
    assert one.environment()[KEY] == WORD
    bare = Vllm(tmp_path, "http://127.0.0.1:1", "m", "tiny", device="cuda")
    assert "--middleware" not in bare.command()
    assert KEY not in bare.environment()


def test_an_engine_beyond_this_machine_needs_a_key(tmp_path: Path) -> None:
    flags = {"home": str(tmp_path), "engine.url": "http://10.0.0.6:8901", "engine.local": "false"}
    with pytest.raises(ConfigError, match=r"set \[engine\] key"):
        run_engine(load(flags=flags))


@pytest.mark.slow
async def test_gateway_and_reloader_bring_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, WORD)
    light = LightEngine(write_model(tmp_path / "model", seed=0), tmp_path / "log")
    light.start()
    try:
        for key, let_in in ((WORD, True), ("another", False), ("", False)):
            engine, control = make_engine(light.url, resubmits=False, key=key), VllmControl(light.url, key=key)
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
