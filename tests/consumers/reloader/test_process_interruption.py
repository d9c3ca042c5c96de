"""Requests under way outlive a reloader process that is killed over them, whether they are kept or ended."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from infra.bus.base import TopicSpec
from infra.bus.kafka import KafkaBus
from producers.engines.base import Chunk, Sampling
from producers.gateway.serve import make_engine
from tests.support.announced import announce, weight_event
from tests.support.engines import LightEngine, differences, join, until

pytestmark = [pytest.mark.slow, pytest.mark.kafka]
POLICY = "policy"
RUN = "from infra.config import load; from consumers.reloader.serve import run; run(load())"
POINTS = ("reloader.after_freeze", "reloader.after_load")
"""before and after the weights are changed; `test_process.py` kills at every point"""
PROMPT = [22, 10, 14, 40]
LENGTH = 400
EXACT = 2e-5


@pytest.fixture
def light(folders: list[Path], tmp_path: Path) -> Iterator[LightEngine]:
    server = LightEngine(folders[0], tmp_path / "log")
    server.start()
    yield server
    server.kill()


def serves(light: LightEngine, version: int) -> bool:
    label = httpx.get(f"{light.url}/weight_info").json()["weight_version"]
    return bool(label == f"{POLICY}@{version}" and not httpx.get(f"{light.url}/is_paused").json()["is_paused"])


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_they_end_whole_and_each_token_names_its_version(
    broker: str, light: LightEngine, folders: list[Path], tmp_path: Path, mode: str
) -> None:
    namespace, armed = f"interrupted-{mode}", tmp_path / "armed"
    armed.mkdir()
    environment = {
        **os.environ,
        "MILLRACE_NAMESPACE": namespace,
        "MILLRACE_KAFKA__BOOTSTRAP": broker,
        "MILLRACE_POLICY__NAME": POLICY,
        "MILLRACE_ENGINE__KIND": "inprocess",
        "MILLRACE_ENGINE__URL": light.url,
        "MILLRACE_ENGINE__INTERRUPT": mode,
        "MILLRACE_KILL_DIR": str(armed),
    }
    engine = make_engine(light.url, resubmits=mode == "abort")
    weights, workers = f"{namespace}.{POLICY}.weights", f"{namespace}.workers"
    replies: list[Chunk] = []
    enough = asyncio.Event()

    async def ask_again_and_again(number: int) -> None:
        """One request is under way, or just between two, at any time."""
        while not enough.is_set():
            sampling, name = Sampling(LENGTH, ignore_eos=True), f"{mode}-{number}-{len(replies)}"
            chunks = engine.generate(PROMPT, sampling, request_id=name, stream=bool(number))
            replies.append(join([chunk async for chunk in chunks]))

    def spawn() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", RUN], env=environment)

    with KafkaBus(broker) as bus:
        bus.ensure_topics([TopicSpec(weights, 1), TopicSpec(workers, 1, {"cleanup.policy": "compact"})])
        announce(bus, weight_event(0, folders[0]), weights)
        reloader = spawn()
        try:
            await until(lambda: serves(light, 0))
            asking = [asyncio.create_task(ask_again_and_again(number)) for number in range(2)]
            for version, point in enumerate(POINTS, 1):
                (armed / point).touch()
                announce(bus, weight_event(version, folders[version]), weights)
                await until(lambda doomed=reloader: doomed.poll() is not None)
                assert reloader.returncode == -9
                assert httpx.get(f"{light.url}/is_paused").json()["is_paused"]
                reloader = spawn()
                await until(lambda version=version: serves(light, version))
            enough.set()
            await asyncio.gather(*asking)
        finally:
            reloader.terminate()
            assert reloader.wait(60) == 0
    await engine.close()
    for reply in replies:
        assert (len(reply.token_ids), reply.finish_reason) == (LENGTH, "length")
        for span in reply.spans:
            folder = folders[int(span.label.removeprefix(f"{POLICY}@"))]
            found = differences(folder, PROMPT, reply.token_ids, reply.logprobs)[span.start : span.end]
            assert max(found) < EXACT, f"{span} is of other weights"
