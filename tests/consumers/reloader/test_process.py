"""The reloader as a process on a real broker, killed with SIGKILL at every point of a swap."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.infra.log.base import TopicSpec
from millrace.infra.log.kafka.bus import KafkaBus
from tests.consumers.reloader.reloading import spawn
from tests.support.announced import NAMESPACE, POLICY, WEIGHTS, WORKERS, announce, statuses, weight_event
from tests.support.engines import LightEngine, until
from tests.support.fault_points import fault_points
from tests.support.forked import Fork

pytestmark = [pytest.mark.slow, pytest.mark.kafka]
POINTS = [point for point in fault_points("consumers") if point.startswith("reloader.")]


@pytest.fixture
def light(folders: list[Path], tmp_path: Path) -> Iterator[LightEngine]:
    server = LightEngine(folders[0], tmp_path / "log")
    server.start()
    yield server
    server.kill()


async def test_killed_at_every_point_the_next_start_finishes(
    broker: str, light: LightEngine, folders: list[Path], tmp_path: Path
) -> None:
    def run(point: str = "") -> Fork:
        return spawn(broker, NAMESPACE, POLICY, light.url, tmp_path / "reloader.log", KILL=point)

    with KafkaBus(broker) as bus:
        bus.ensure_topics([TopicSpec(WEIGHTS, 1), TopicSpec(WORKERS, 1, {"cleanup.policy": "compact"})])
        for version, point in enumerate(POINTS):
            announce(bus, weight_event(version, folders[version % 3]))
            doomed = run(point)
            await until(lambda doomed=doomed: doomed.poll() is not None)
            assert doomed.poll() == -9, point
        last = run()
        try:
            await until(lambda: light.serves(f"{POLICY}@{len(POINTS) - 1}"))
            stands = ("serving", len(POINTS) - 1)  # those that were killed may have said it of versions before
            await until(lambda: any(s is not None and (s["state"], s["version"]) == stands for s in statuses(bus)))
        finally:
            last.terminate()
            assert last.wait(120) == 0
        newest = statuses(bus)[-1]
        assert newest is not None
        assert (newest["version"], newest["url"]) == (len(POINTS) - 1, light.url)
