"""Requests under way outlive a reloader process that is killed over them, whether they are kept or ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.infra.engines.base import Sampling
from millrace.infra.engines.kinds import open_engine
from millrace.infra.log.base import TopicSpec
from millrace.infra.log.kafka.bus import KafkaBus
from tests.consumers.reloader.crowd import Crowd, check_versions
from tests.consumers.reloader.reloading import spawn
from tests.support.announced import announce, weight_event
from tests.support.engines import LightEngine, until
from tests.support.forked import Fork

pytestmark = [pytest.mark.slow, pytest.mark.kafka]
POLICY = "policy"
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


@pytest.mark.parametrize(("mode", "stream"), [("keep", True), ("abort", False)])
async def test_they_end_whole_and_each_token_names_its_version(
    broker: str, light: LightEngine, folders: list[Path], tmp_path: Path, mode: str, stream: bool
) -> None:
    namespace, armed = f"interrupted-{mode}", tmp_path / "armed"
    armed.mkdir()
    engine = open_engine("inprocess", light.url, resubmits=mode == "abort")
    weights, workers = f"{namespace}.{POLICY}.weights", f"{namespace}.workers"

    def run() -> Fork:
        log = tmp_path / "reloader.log"
        return spawn(broker, namespace, POLICY, light.url, log, ENGINE__INTERRUPT=mode, KILL_DIR=str(armed))

    with KafkaBus(broker) as bus:
        bus.ensure_topics([TopicSpec(weights, 1), TopicSpec(workers, 1, {"cleanup.policy": "compact"})])
        announce(bus, weight_event(0, folders[0]), weights)
        reloader = run()
        try:
            await until(lambda: light.serves(f"{POLICY}@0"))
            async with Crowd(engine, PROMPT, Sampling(LENGTH, ignore_eos=True), size=2, stream=stream) as crowd:
                for version, point in enumerate(POINTS, 1):
                    (armed / point).touch()
                    announce(bus, weight_event(version, folders[version]), weights)
                    await until(lambda doomed=reloader: doomed.poll() is not None)
                    assert reloader.poll() == -9
                    assert light.state().paused
                    reloader = run()
                    await until(lambda version=version: light.serves(f"{POLICY}@{version}"))
        finally:
            reloader.terminate()
            assert reloader.wait(120) == 0
    await engine.close()
    for reply in crowd.replies:
        assert (len(reply.token_ids), reply.finish_reason) == (LENGTH, "length")
        check_versions(reply, PROMPT, folders[:3], EXACT)
