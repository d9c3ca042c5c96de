"""Broadcasts into the real vLLM and the real SGLang: their workers join a real group, and serve exactly what the
learner's end sent."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from millrace.consumers.learner.version.sender import WeightSender
from millrace.consumers.reloader.broadcast import FromLearner
from millrace.consumers.reloader.transport import SharedDirectory
from millrace.infra.engines.base import Sampling
from millrace.infra.engines.control import EngineControl
from millrace.infra.engines.kinds import KINDS, KindName
from millrace.infra.errors import EngineError
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.process.net import LOCALHOST
from tests.consumers.reloader.conftest import Start
from tests.consumers.reloader.reloading import leave
from tests.support import logged
from tests.support.announced import announce, weight_event
from tests.support.engines import complete, differences, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROMPT = [22, 10, 14, 40]
EXACT = 1e-5
OPEN = {"vllm": "/start_weight_update", "sglang": "/begin_weight_update"}
"""routes that begin an update"""
SENDER = """
import sys, time
from pathlib import Path
from millrace.consumers.learner.version.sender import WeightSender
one = WeightSender("127.0.0.1", 120)
one.hold(1, sys.argv[1], Path(sys.argv[2]))
print(one.url, flush=True)
time.sleep(3600)
"""


@pytest.fixture(params=[pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)])
def kind(request: pytest.FixtureRequest) -> KindName:
    name: KindName = request.param
    return name


@pytest.fixture
async def control(kind: KindName, request: pytest.FixtureRequest, folders: list[Path]) -> AsyncIterator[EngineControl]:
    """Of an engine that has loaded one version from a directory, as SGLang must before it receives any."""
    one = KINDS[kind].control(request.getfixturevalue(kind).url, "")
    await one.load(folders[0])
    yield one
    await leave(one, folders[0])


async def serves(kind: KindName, url: str, folder: Path) -> bool:
    """Whether the log-probabilities are those of the weights in `folder`."""
    engine = KINDS[kind].client(url, "")
    try:
        (choice,) = await complete(engine, PROMPT, Sampling(20, ignore_eos=True))
        return max(differences(folder, PROMPT, choice.token_ids, choice.logprobs)) < EXACT
    finally:
        await engine.close()


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    one = WeightSender(LOCALHOST, timeout_s=120)
    yield one
    one.close()


async def test_versions_come_without_a_disk(
    kind: KindName,
    control: EngineControl,
    sender: WeightSender,
    bus: MemoryBus,
    folders: list[Path],
    start: Start,
    tmp_path: Path,
) -> None:
    async with start(control, transport=FromLearner(SharedDirectory())) as reloader:
        for version in range(3):
            gone = Path(shutil.copytree(folders[version], tmp_path / f"v{version}"))
            event = {**weight_event(version, gone), "broadcast": sender.url}
            shutil.rmtree(gone)  # only the broadcast can bring it
            sender.hold(version, event["digest"], folders[version] / "model.safetensors")
            announce(bus, event)
            await until(lambda version=version: reloader.served == version, timeout_s=120)
            assert await serves(kind, control.url, folders[version])


async def test_a_transfer_that_fails_leaves_the_weights_and_the_next_one_works(
    kind: KindName, control: EngineControl, sender: WeightSender, folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    await control.pause()
    await control.load(folders[0])
    transport = FromLearner(SharedDirectory())
    event = {**weight_event(1, folders[1]), "broadcast": sender.url}

    sender.hold(1, event["digest"], folders[2] / "model.safetensors")  # other bytes than the event's
    wrong = await transport._ask(control, event)
    with pytest.raises(EngineError, match="sha256 differs"):
        await control.receive(wrong)
    await control.reset_prefix_cache()
    await control.resume()
    assert await serves(kind, control.url, folders[0]), "untouched"

    await control.pause()
    await (await transport.prepare(control, event, {1: event}, None)).load()
    assert "reading its directory" in caplog.text
    await control.reset_prefix_cache()
    await control.resume()
    assert await serves(kind, control.url, folders[1])

    await control.pause()
    async with httpx.AsyncClient(base_url=control.url) as client:
        (await client.post(OPEN[kind], json={})).raise_for_status()  # a reloader was killed here
    event = {**weight_event(2, folders[2]), "broadcast": sender.url}
    sender.hold(2, event["digest"], folders[2] / "model.safetensors")
    caplog.clear()
    await (await transport.prepare(control, event, {2: event}, None)).load()
    assert not logged.records(caplog, "millrace.consumers.reloader")
    await control.reset_prefix_cache()
    await control.resume()
    assert await serves(kind, control.url, folders[2])


@pytest.fixture
def doomed(folders: list[Path]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that sends version 1, and is killed in the middle of its first transfer; and its address."""
    command = [sys.executable, "-c", SENDER, weight_event(1, folders[1])["digest"]]
    process = subprocess.Popen(
        [*command, str(folders[1] / "model.safetensors")],
        env={**os.environ, "MILLRACE_KILL": "sender.between_pieces"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process:
        yield process, process.stdout.readline().strip()
        process.kill()


async def test_a_learner_that_dies_in_the_middle_leaves_neither_half_a_model_nor_a_wait(
    kind: KindName,
    control: EngineControl,
    folders: list[Path],
    doomed: tuple[subprocess.Popen[str], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    process, url = doomed
    event = {**weight_event(1, folders[1]), "broadcast": url}
    await control.pause()
    await control.load(folders[0])
    offer = await FromLearner(SharedDirectory())._ask(control, event)
    with pytest.raises(EngineError):
        await control.receive(offer)
    assert process.wait(60) == -9
    await control.reset_prefix_cache()
    await control.resume()
    assert await serves(kind, control.url, folders[0]), "untouched"

    await control.pause()
    await (await FromLearner(SharedDirectory()).prepare(control, event, {1: event}, None)).load()
    assert "reading its directory" in caplog.text
    await control.reset_prefix_cache()
    await control.resume()
    assert await serves(kind, control.url, folders[1])
