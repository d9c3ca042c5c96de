"""Each engine with its control, in known weights: every conformance test runs on all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from millrace.infra.engines.base import Engine
from millrace.infra.engines.control import EngineControl
from millrace.infra.engines.inprocess.engine import InprocessEngine
from millrace.infra.engines.kinds import KINDS
from tests.support.engines import DirectControl, LightEngine
from tests.support.tiny_model import write_model


@dataclass
class Rig:
    """An engine under test. `models` are directories of seeds 0 (loaded) and 1."""

    engine: Engine
    control: EngineControl
    models: tuple[Path, Path]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    return write_model(root / "m0", 0), write_model(root / "m1", 1)


@pytest.fixture(scope="session")
def light(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightEngine]:
    server = LightEngine(models[0], tmp_path_factory.mktemp("light") / "log")
    server.start()
    yield server
    server.kill()


@pytest.fixture(
    params=[
        "inprocess",
        pytest.param("served", marks=pytest.mark.slow),
        pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.vllm]),
        pytest.param("sglang", marks=[pytest.mark.slow, pytest.mark.sglang]),
    ]
)
async def rig(request: pytest.FixtureRequest, models: tuple[Path, Path]) -> AsyncIterator[Rig]:
    engine: Engine
    control: EngineControl
    if request.param == "inprocess":
        direct = InprocessEngine(models[0], seed=0)
        engine, control = direct, DirectControl(direct)
    else:
        server = request.getfixturevalue("light" if request.param == "served" else request.param)
        kind = KINDS[request.param if request.param in KINDS else "inprocess"]
        engine, control = kind.client(server.url, ""), kind.control(server.url, "")
        await control.load(models[0])
        await control.set_version("policy@0")
        await control.reset_prefix_cache()
        await control.resume()
    await control.set_version("policy@0")
    yield Rig(engine, control, models)
    if request.param != "inprocess":
        await control.pause("abort")
        await control.load(models[0])
        await control.reset_prefix_cache()
        await control.resume()
    await control.close()
    await engine.close()
