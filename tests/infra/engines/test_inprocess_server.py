"""What the light server answers to bad requests, and how its process ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from millrace.infra.engines.base import Chunk, Sampling
from millrace.infra.engines.inprocess.engine import InprocessEngine
from millrace.infra.engines.inprocess.server import build_app
from tests.support.engines import LightEngine, complete, differences

GENERATE = "/inference/v1/generate"


@pytest.fixture
async def client(models: tuple[Path, Path]) -> AsyncIterator[httpx.AsyncClient]:
    engine = InprocessEngine(models[0])
    transport = httpx.ASGITransport(build_app(engine, "tiny"))
    async with httpx.AsyncClient(transport=transport, base_url="http://light") as found:
        yield found
    await engine.close()


BAD: dict[str, tuple[str, bytes, int]] = {
    "not json": (GENERATE, b"{", 400),
    "no prompt": (GENERATE, b'{"sampling_params":{}}', 400),
    "wrong types": (GENERATE, b'{"token_ids":"abc","sampling_params":{}}', 400),
    "floats": (GENERATE, b'{"token_ids":[1.5],"sampling_params":{}}', 400),
    "empty prompt": (GENERATE, b'{"token_ids":[],"sampling_params":{}}', 400),
    "foreign token": (GENERATE, b'{"token_ids":[512],"sampling_params":{}}', 400),
    "bad sampling": (GENERATE, b'{"token_ids":[1],"sampling_params":{"temperature":-1}}', 400),
    "other model": (GENERATE, b'{"model":"x","token_ids":[1],"sampling_params":{}}', 404),
    "streamed refusal": (GENERATE, b'{"token_ids":[512],"sampling_params":{},"stream":true}', 400),
    "unknown pause": ("/pause", b'{"mode":"sleep"}', 400),
    "no weights": ("/load", b"{}", 400),
    "no such weights": ("/load", b'{"folder":"/none"}', 500),
    "no label": ("/label", b"{}", 400),
    "bad abort": ("/abort", b'{"request_ids":1}', 400),
    "no route": ("/shutdown", b"", 404),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_requests_are_named_and_do_no_harm(client: httpx.AsyncClient, name: str) -> None:
    path, body, status = BAD[name]
    answer = await client.post(path, content=body)
    assert answer.status_code == status
    if path != "/shutdown":
        assert answer.json()["error"]["message"]
    good = await client.post(
        GENERATE, json={"token_ids": [1], "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
    )
    assert len(good.json()["choices"][0]["token_ids"]) == 2


async def test_models_and_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
    assert "version" in (await client.get("/version")).json()


async def test_weights_come_from_a_group_or_not_at_all(models: tuple[Path, Path]) -> None:
    engine = InprocessEngine(models[0])
    joined: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []

    def receiver(group: Mapping[str, Any], announced: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        joined.append((group, announced))
        if announced["digest"] == "bad":
            raise RuntimeError("the sender is gone")
        return load_file(models[1] / "model.safetensors")

    async def receive(client: httpx.AsyncClient, digest: str) -> httpx.Response:
        return await client.post("/receive", json={"group": {"port": 7}, "announced": {"digest": digest}})

    async def sampled() -> Chunk:
        (choice,) = await complete(engine, [5, 6, 7], Sampling(8, temperature=0, ignore_eos=True))
        return choice

    transport = httpx.ASGITransport(build_app(engine, "tiny", receiver))
    async with httpx.AsyncClient(transport=transport, base_url="http://light") as client:
        assert (await client.get("/state")).json()["receives"]
        before = await sampled()
        answer = await receive(client, "bad")
        assert answer.status_code == 500
        assert "the sender is gone" in answer.json()["error"]["message"]
        assert (await sampled()).logprobs == before.logprobs, "untouched"
        assert (await receive(client, "good")).status_code == 200
        after = await sampled()
        assert max(differences(models[1], [5, 6, 7], after.token_ids, after.logprobs)) < 2e-5
    assert joined == [({"port": 7}, {"digest": "bad"}), ({"port": 7}, {"digest": "good"})]
    await engine.close()


async def test_without_a_receiver_it_takes_none(client: httpx.AsyncClient) -> None:
    assert not (await client.get("/state")).json()["receives"]
    assert (await client.post("/receive", json={})).status_code == 404


@pytest.mark.slow
def test_sigterm_ends_it_cleanly(models: tuple[Path, Path], tmp_path: Path) -> None:
    server = LightEngine(models[0], tmp_path / "log")
    server.start()
    process = server.process
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0


@pytest.mark.slow
def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "millrace.infra.engines.inprocess.server",
        "--model",
        str(tmp_path),
        "--port",
        "1",
    ]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode != 0
