"""The local vLLM server: it starts, has the routes we need, and leaves nothing behind."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import httpx
import psutil
import pytest

from millrace.infra.config import load
from millrace.infra.engines.base import Grammar, Sampling
from millrace.infra.engines.kind import Device
from millrace.infra.engines.vllm import launch as module
from millrace.infra.engines.vllm.engine import VllmEngine
from millrace.infra.engines.vllm.launch import (
    CPU_BUILD,
    GPU_BUILD,
    IDLE_GPU,
    ONE_PROCESS,
    Vllm,
    adapter_arguments,
    build_here,
)
from millrace.infra.errors import ConfigError, EngineRejected, ServiceError
from millrace.infra.machine.local import adapter_room
from millrace.infra.process.net import socket_dir
from tests.support import logged
from tests.support.engines import complete


def test_what_is_no_model_is_refused_before_half_a_minute_is_lost(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"config\.json"):
        Vllm(tmp_path, "http://127.0.0.1:1", str(tmp_path), "tiny", device="cpu").start()


def test_a_gpu_server_gets_no_cpu_flags(tmp_path: Path) -> None:
    one = Vllm(tmp_path, "http://127.0.0.1:1234", "m", "tiny", device="cuda", args=("--tensor-parallel-size", "2"))
    assert "--enforce-eager" not in one.command()
    assert one.command()[-2:] == ["--tensor-parallel-size", "2"]
    assert "TORCHDYNAMO_DISABLE" not in one.environment()


def test_sockets_have_short_paths(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    assert len(str(socket_dir(deep))) < 67
    assert socket_dir(deep) == socket_dir(deep)
    socket_dir(deep).rmdir()


def machine(monkeypatch: pytest.MonkeyPatch, builds: set[str], gpu: bool) -> None:
    """This machine has these builds of vLLM, and a GPU or none."""

    def version(package: str) -> str:
        if package not in builds:
            raise PackageNotFoundError(package)
        return "1"

    monkeypatch.setattr(module, "version", version)
    monkeypatch.setattr(module, "usable", lambda: gpu)


@pytest.mark.parametrize(
    ("builds", "gpu", "wanted", "device"),
    [
        ({CPU_BUILD}, False, "auto", "cpu"),
        ({CPU_BUILD}, True, "auto", "cpu"),
        ({CPU_BUILD}, True, "cpu", "cpu"),
        ({GPU_BUILD}, True, "auto", "cuda"),
        ({GPU_BUILD}, True, "cuda", "cuda"),
        ({CPU_BUILD, GPU_BUILD}, True, "auto", "cuda"),
    ],
)
def test_it_runs_on_what_the_build_is_for(
    monkeypatch: pytest.MonkeyPatch, builds: set[str], gpu: bool, wanted: Device, device: str
) -> None:
    machine(monkeypatch, builds, gpu)
    assert build_here(wanted) == device


@pytest.mark.parametrize(
    ("builds", "gpu", "wanted", "says"),
    [
        (set(), False, "auto", "`make setup` installs its CPU build, `make setup ENGINE=gpu` its GPU build"),
        (set(), True, "cuda", "`make setup ENGINE=gpu` its GPU build"),
        ({CPU_BUILD}, True, "cuda", "device is cuda: run `make setup ENGINE=gpu`"),
        ({GPU_BUILD}, False, "auto", "CUDA finds no GPU .*: run `make setup ENGINE=cpu`"),
        ({GPU_BUILD}, False, "cuda", "CUDA finds no GPU .*: run `make setup ENGINE=cpu`"),
        ({GPU_BUILD}, True, "cpu", "does not run on a CPU: run `make setup ENGINE=cpu`"),
        ({CPU_BUILD, GPU_BUILD}, False, "auto", r"remove \.venv and run `make setup`"),
        ({CPU_BUILD, GPU_BUILD}, True, "cpu", r"remove \.venv and run `make setup`"),
    ],
)
def test_the_wrong_build_is_refused_with_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builds: set[str], gpu: bool, wanted: Device, says: str
) -> None:
    machine(monkeypatch, builds, gpu)
    with pytest.raises(ServiceError, match=says):
        build_here(wanted)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ServiceError, match=says):
        Vllm(tmp_path / "home", "http://127.0.0.1:1", str(tmp_path), "tiny", device=wanted).prepare()


def test_a_gpu_that_stays_idle_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine(monkeypatch, {CPU_BUILD}, True)
    Vllm(tmp_path, "http://127.0.0.1:1", "m", "tiny", device="cpu")
    assert not logged.lines(caplog, "millrace.infra.engines")
    assert Vllm(tmp_path, "http://127.0.0.1:1", "m", "tiny").device == "cpu"
    assert logged.lines(caplog, "millrace.infra.engines") == [IDLE_GPU]


@pytest.mark.slow
@pytest.mark.vllm
def test_tokens_in_tokens_out_with_versions(vllm: Vllm) -> None:
    body = {
        "model": "tiny",
        "token_ids": [22, 10, 14, 40],
        "sampling_params": {"max_tokens": 4, "temperature": 1.0, "logprobs": 1, "ignore_eos": True},
    }
    answer = httpx.post(f"{vllm.url}/inference/v1/generate", json=body, timeout=60).raise_for_status().json()
    assert len(answer["choices"][0]["token_ids"]) == 4
    assert "weight_versions" in answer["choices"][0]
    assert httpx.get(f"{vllm.url}/weight_info", timeout=10).json()["weight_version"]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_schema_that_cannot_be_compiled_is_refused_and_nothing_else_suffers(vllm: Vllm, streamed: bool) -> None:
    engine = VllmEngine(vllm.url, "tiny", patience_s=0)
    patterns = ["^(a|b", r"\p{Han}+", r"(a)\1", "[z-a]", "\\"]
    schemas = [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, {"type": "nonsense"}]
    schemas.append({"type": "object", "patternProperties": {"[": {}}})
    for schema in [*schemas, *({"type": "string", "pattern": pattern} for pattern in patterns)]:
        with pytest.raises(EngineRejected) as refused:
            await complete(engine, [1], Sampling(4, grammar=Grammar("json", json.dumps(schema))), stream=streamed)
        assert refused.value.status == 400
    shaped = Sampling(4, grammar=Grammar("json", '{"type": "object"}'))
    (choice,) = await complete(engine, [1], shaped, stream=streamed)
    assert choice.token_ids
    await engine.close()


@pytest.mark.slow
@pytest.mark.vllm
def test_its_own_processes_are_children(vllm: Vllm) -> None:
    assert vllm.pid
    assert len(psutil.Process(vllm.pid).children(recursive=True)) >= 1


def test_on_a_cpu_the_model_is_in_the_process_that_schedules_unless_several_are_wished(tmp_path: Path) -> None:
    def command(device: Device, *args: str) -> list[str]:
        return Vllm(tmp_path, "http://127.0.0.1:1", "m", "tiny", device=device, args=args).command()

    assert ONE_PROCESS in command("cpu")
    assert ONE_PROCESS not in command("cuda")
    for args in (("--tensor-parallel-size", "2"), ("--pipeline-parallel-size=2",), ("-tp", "2")):
        assert ONE_PROCESS not in command("cpu", *args)


def test_adapters_get_room_for_those_that_requests_may_need(tmp_path: Path) -> None:
    flags = {"home": str(tmp_path), "policy.eta": 2, "learner.lora": '{"rank": 12, "publish": "adapter"}'}
    settings = load(None, flags)
    one = Vllm(
        tmp_path,
        "http://127.0.0.1:1",
        "m",
        "tiny",
        device="cpu",
        args=adapter_arguments(adapter_room(settings)),
        adapters=True,
    )
    words = " ".join(one.command())
    assert "--enable-lora --max-lora-rank 16 --max-loras 5 --max-cpu-loras 5" in words
    assert one.environment()["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    merged = load(None, flags | {"learner.lora": '{"rank": 12}'})
    assert adapter_arguments(adapter_room(merged)) == ()
    with pytest.raises(ConfigError, match=r"needs \[engine\] kind vllm or sglang, not inprocess"):
        load(None, flags | {"engine.kind": "inprocess"})
