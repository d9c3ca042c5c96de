"""A deployment that loses its power while it is being made, or soon after, is made by the next `up`, and the log keeps
every record that was acknowledged. It needs no learner and no engine, so it can be cut often."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from millrace.infra.config import Settings, load
from millrace.infra.connect import connect
from millrace.infra.machine import leftovers
from millrace.infra.machine.deployment import Deployment
from millrace.infra.process.net import free_ports, wait_until
from tests.chaos.arena import write_settings
from tests.chaos.disk import Disk
from tests.chaos.elements import freeze
from tests.chaos.starting import STEPS, topic
from tests.support.tiny_model import write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.kafka,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not Disk.possible(), reason="a disk of our own needs root and a loop device"),
]

PATIENCE_S = 300.0


class Cut:
    """A deployment in a home on a disk of its own, that is started and cut again and again."""

    def __init__(self, folder: Path, disk: Disk, name: str = "home") -> None:
        self.home = disk.place / name
        self._disk = disk
        self._model = write_model(folder / "model", seed=0)
        values = {
            "namespace": "cut",
            "home": str(self.home),
            "kafka.bootstrap": f"127.0.0.1:{free_ports(1)[0]}",
            "kafka.sync": True,
            "engine.kind": "inprocess",
        }
        self._file = write_settings(folder / name, values)
        self.settings: Settings = load(self._file)
        self._said = folder / f"{name}.said"
        self._life: subprocess.Popen[bytes] | None = None
        self.acknowledged = -1
        """the last record that any life of it heard of"""

    def start(self) -> subprocess.Popen[bytes]:
        """One more life."""
        with self._said.open("wb") as out:
            command = [sys.executable, "-m", "tests.chaos.starting", str(self._file), str(self._model)]
            self._life = subprocess.Popen(command, stdout=out)
        return self._life

    def said(self) -> list[str]:
        """What this life printed, in whole lines."""
        return self._said.read_text().split("\n")[:-1]

    def until(self, life: subprocess.Popen[bytes], reached: Callable[[], bool], what: str) -> None:
        """Wait for something in this life."""

        def looked() -> bool:
            assert life.poll() is None, f"it ended by itself with code {life.returncode} before {what}"
            return reached()

        wait_until(looked, what, PATIENCE_S)

    def cut(self, life: subprocess.Popen[bytes]) -> None:
        """The power fails."""
        deployment = leftovers.deployment_id(self.settings.namespace, self.settings.home)
        frozen = freeze(lambda: [psutil.Process(life.pid), *leftovers.find(deployment)])
        self._remember()
        left = self._disk.snapshot()
        for process in frozen:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        life.wait()
        psutil.wait_procs(frozen, 30)
        self._disk.restore(left)

    def close(self) -> None:
        """End what still runs."""
        if self._life is not None:
            self._life.kill()
            self._life.wait()
        Deployment(self.settings, {}).down()

    def check(self, life: subprocess.Popen[bytes]) -> None:
        """Check that every record that was acknowledged is there, once and in order."""
        life.kill()
        life.wait()
        self._remember()
        with connect(self.settings) as bus:
            values = [record.value for record in bus.read(topic(self.settings), 0)]
        assert values == [str(number).encode() for number in range(len(values))]
        assert self.acknowledged >= 0, "something was acknowledged"
        assert len(values) > self.acknowledged

    def _remember(self) -> None:
        numbers = [int(line) for line in self.said() if line.isdigit()]
        self.acknowledged = max([self.acknowledged, *numbers])


@pytest.fixture
def cut(tmp_path: Path) -> Iterator[Cut]:
    disk = Disk(tmp_path / "disk", 1000)
    made = Cut(tmp_path, disk)
    yield made
    made.close()
    disk.close()


def test_a_start_outlives_a_power_cut_after_each_of_its_steps(cut: Cut) -> None:
    broker = cut.home / "broker"

    def there(*names: str) -> Callable[[], bool]:
        return lambda: any(broker.glob("/".join(names)))

    steps: dict[str, Callable[[], bool]] = {
        "the keys": (cut.home / "keys" / "broker").exists,
        "the broker's settings": there("server.properties"),
        "its identity": there("cluster.id"),
        "a formatted directory": there("data", "meta.properties"),
        "its own log": there("data", "__cluster_metadata-0", "*.log"),
        "a topic": there("data", "cut.*"),
        **{f"`{step}`": lambda step=step: step in cut.said() for step in STEPS},  # type: ignore[misc]
        "records": lambda: len(cut.said()) > len(STEPS) + 20,
    }
    for what, reached in steps.items():
        life = cut.start()
        cut.until(life, reached, what)
        cut.cut(life)
    life = cut.start()
    cut.until(life, lambda: len(cut.said()) > len(STEPS), "records after the cuts")
    cut.check(life)
