"""Who dies while the other two are in the middle of a broadcast: a reloader process, an engine process, and the sender
that must outlive both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from millrace.consumers.learner.version.sender import WeightSender
from millrace.infra import faults
from millrace.infra.engines.base import Sampling
from millrace.infra.engines.kinds import KINDS
from millrace.infra.log.base import TopicSpec
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.process.net import LOCALHOST
from millrace.schemas.labels import LOADING
from tests.consumers.reloader.reloading import Served, spawn
from tests.support.announced import POLICY, announce, weight_event
from tests.support.engines import EVERY_POINT, complete, differences, until
from tests.support.forked import Fork

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(900)]
PROMPT = [22, 10, 14, 40]
EXACT = 2e-5


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


async def serves(served: Served, version: int, folder: Path) -> bool:
    """Whether the engine samples from the weights in `folder` and calls them `version`."""
    state = await served.control.state()
    if state.label != f"{POLICY}@{version}" or state.paused:
        return False
    engine = KINDS[served.kind].client(served.url, "")
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
    served: Served,
    sender: WeightSender,
    folders: list[Path],
    midway: Callable[[Callable[[], None]], list[str]],
    tmp_path: Path,
) -> None:
    namespace = f"midway-{served.kind}"
    weights, workers = f"{namespace}.{POLICY}.weights", f"{namespace}.workers"

    def run() -> Fork:
        settings = {"ENGINE__WEIGHTS": "broadcast", "ENGINE__KIND": served.kind}
        return spawn(broker, namespace, POLICY, served.url, tmp_path / "reloader.log", **settings)

    def publish(bus: KafkaBus, version: int) -> None:
        event = {**weight_event(version, folders[version % 3]), "broadcast": sender.url}
        sender.hold(version, event["digest"], folders[version % 3] / "model.safetensors")
        announce(bus, event, weights)

    with KafkaBus(broker) as bus:
        bus.ensure_topics([TopicSpec(weights, 1), TopicSpec(workers, 1, {"cleanup.policy": "compact"})])
        announce(bus, weight_event(0, folders[0]), weights)  # from a directory, as the first must come to SGLang
        reloader = run()
        try:
            await until(lambda: serves(served, 0, folders[0]))
            done = midway(reloader.kill)  # the engine receives the rest, and nobody tells it to go on
            publish(bus, 1)
            await until(lambda: bool(done) and reloader.poll() is not None and not sending())
            state = await served.control.state()
            assert state.paused, "nothing is sampled meanwhile"
            assert state.label == LOADING
            reloader = run()
            await until(lambda: serves(served, 1, folders[1]))

            if EVERY_POINT or served.kind == "inprocess":  # a real engine takes a minute to come back
                done = midway(served.server.kill)
                publish(bus, 2)
                await until(lambda: bool(done) and not sending())  # the learner's end gives up at once
                asked = {"version": 2, "digest": "of another", "ranks": 1}
                assert httpx.post(f"{sender.url}/send", json=asked).status_code == 404, "and answers"
                await asyncio.to_thread(served.server.start)
                await until(lambda: serves(served, 2, folders[2]))
        finally:
            reloader.terminate()
            assert reloader.wait(120) == 0
