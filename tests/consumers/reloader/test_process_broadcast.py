"""Who dies while the other two are in the middle of a broadcast: a reloader process, an engine process, and the sender
that must outlive both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from millrace.consumers.learner.version.sender import WeightSender
from millrace.infra import faults
from millrace.infra.engines.base import Sampling
from millrace.infra.engines.kind import RECEIVER
from millrace.infra.engines.vllm.engine import VllmEngine
from millrace.infra.log.base import TopicSpec
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.process.net import LOCALHOST
from tests.consumers.reloader.reloading import spawn
from tests.support.announced import announce, weight_event
from tests.support.engines import LightEngine, complete, differences, until
from tests.support.forked import Fork

pytestmark = [pytest.mark.slow, pytest.mark.kafka]
NAMESPACE, POLICY = "midway", "policy"
WEIGHTS, WORKERS = f"{NAMESPACE}.{POLICY}.weights", f"{NAMESPACE}.workers"
PROMPT = [22, 10, 14, 40]
EXACT = 2e-5


@pytest.fixture
def light(folders: list[Path], tmp_path: Path) -> Iterator[LightEngine]:
    server = LightEngine(folders[0], tmp_path / "log", ("--receiver", RECEIVER))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    one = WeightSender(LOCALHOST, timeout_s=120)
    yield one
    one.close()


@pytest.fixture
def midway() -> Iterator[Callable[[Callable[[], None]], list[str]]]:
    """Do something once, in the middle of the next transfer. The list grows when that has happened."""

    def arm(act: Callable[[], None]) -> list[str]:
        done: list[str] = []

        def hook(name: str) -> None:
            if name == "sender.between_pieces" and not done:
                act()
                done.append(name)

        faults.install(hook)
        return done

    before = faults.install(None)
    yield arm
    faults.install(before)


async def serves(light: LightEngine, version: int, folder: Path) -> bool:
    """Whether the engine samples from the weights in `folder` and calls them `version`."""
    if not light.serves(f"{POLICY}@{version}"):
        return False
    engine = VllmEngine(light.url)
    try:
        (choice,) = await complete(engine, PROMPT, Sampling(20, ignore_eos=True))
    finally:
        await engine.close()
    assert max(differences(folder, PROMPT, choice.token_ids, choice.logprobs)) < EXACT
    return True


def sending() -> bool:
    return any(thread.name.startswith("send-") for thread in threading.enumerate())


async def test_the_others_outlive_who_dies_in_the_middle(
    broker: str,
    light: LightEngine,
    sender: WeightSender,
    folders: list[Path],
    midway: Callable[[Callable[[], None]], list[str]],
    tmp_path: Path,
) -> None:
    def run() -> Fork:
        return spawn(broker, NAMESPACE, POLICY, light.url, tmp_path / "reloader.log", ENGINE__WEIGHTS="broadcast")

    def publish(bus: KafkaBus, version: int) -> None:
        event = {**weight_event(version, folders[version % 3]), "broadcast": sender.url}
        sender.hold(version, event["digest"], folders[version % 3] / "model.safetensors")
        announce(bus, event, WEIGHTS)

    with KafkaBus(broker) as bus:
        bus.ensure_topics([TopicSpec(WEIGHTS, 1), TopicSpec(WORKERS, 1, {"cleanup.policy": "compact"})])
        reloader = run()
        try:
            done = midway(reloader.kill)  # the engine receives the rest, and nobody tells it to go on
            publish(bus, 1)
            await until(lambda: bool(done) and reloader.poll() is not None and not sending())
            assert light.state().paused, "nothing is sampled meanwhile"
            assert light.state().label == "loading"
            reloader = run()
            await until(lambda: serves(light, 1, folders[1]))

            done = midway(light.kill)
            publish(bus, 2)
            await until(lambda: bool(done) and not sending())  # the learner's end gives up at once
            asked = {"version": 2, "digest": "of another", "ranks": 1}
            assert httpx.post(f"{sender.url}/send", json=asked).status_code == 404, "and answers"
            light.start()
            await until(lambda: serves(light, 2, folders[2]))
        finally:
            reloader.terminate()
            assert reloader.wait(120) == 0
