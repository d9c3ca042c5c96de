"""Exactly once on a real broker: processes killed at every named point, frozen and woken, joined and left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace.infra import durable
from millrace.infra.log.base import Outgoing, TopicSpec
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.sweep import sweep
from millrace.infra.machine.broker import Broker
from millrace.infra.stages.replay import verify
from millrace.schemas import codec
from tests.support.counter import Counter
from tests.support.fault_points import fault_points

pytestmark = [pytest.mark.slow, pytest.mark.kafka]

SLOTS = 2
PATIENCE_S = 120.0
POINTS = [name for name in fault_points("infra") if name.startswith(("runner.", "transactor."))]


class Deployment:
    """A namespace on the broker and the processes of its one stage."""

    def __init__(self, broker: str, logs: Path, *, claims: str = "", pad: int = 0) -> None:
        """`pad`: bytes of a value that the stage keeps of each key, behind `claims` where it is too large."""
        self.broker, self.logs = broker, logs
        self.claims, self.pad = claims, pad
        self.namespace = f"n{uuid.uuid4().hex[:10]}"
        self.bus = KafkaBus(broker, session_timeout_s=1.0)
        counts = {"in": SLOTS, "side": 1, "out": 2, "sums": 1, "changelog.counter": SLOTS, "turns.counter": SLOTS}
        self.bus.ensure_topics([TopicSpec(f"{self.namespace}.{name}", count) for name, count in counts.items()])
        self.processes: list[subprocess.Popen[bytes]] = []
        self.sent = 0

    def start(self, kill: str = "") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.infra.stages.counter_process", self.broker, self.namespace]
        command += [self.claims, str(self.pad)]
        with (self.logs / f"{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(command, env={**os.environ, "MILLRACE_KILL": kill}, stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def send(self, count: int, *, again: int = 0) -> None:
        """Numbered records, the last `again` of the former ones repeated before them."""
        with self.bus.publisher() as publisher:
            for n in range(max(0, self.sent - again), self.sent + count):
                headers = {"source": b"g", "source-seq": b"%d" % n}
                publisher.publish(Outgoing(f"{self.namespace}.in", b"k%d" % (n % 7), b"", headers))
            publisher.publish(Outgoing(f"{self.namespace}.side", b"", b""))
            publisher.flush()
        self.sent += count

    def counted(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        name = f"{self.namespace}.out"
        for partition in range(2):
            for record in self.bus.read(name, partition):
                progress = codec.decode_as("Progress", record.value or b"")
                if not progress["stage"].startswith("extra/"):
                    found.setdefault(progress["stage"], []).append(progress["slot"])
        return found

    def wait(self, count: int | None = None) -> None:
        self.wait_for(lambda: sum(map(len, self.counted().values())) >= (self.sent if count is None else count))

    def wait_for(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, self.tell()
            time.sleep(0.05)

    def tell(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(self.logs.iterdir()))

    def check(self) -> None:
        """Everything was counted once, and every turn folds again to what it wrote."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            assert process.wait(PATIENCE_S) in (0, -signal.SIGKILL, -signal.SIGTERM), self.tell()
        counted = self.counted()
        assert sum(map(len, counted.values())) == self.sent
        assert all(found == list(range(1, len(found) + 1)) for found in counted.values())
        self.verify()

    def verify(self) -> None:
        """Every turn folds again to what it wrote, and the changelog holds the state that it comes to."""
        claims = ClaimStore(self.claims) if self.claims else None
        assert all(verify(self.bus, Counter(self.pad), self.namespace, slot, claims) for slot in range(SLOTS))

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.bus.close()


@pytest.fixture
def deployment(broker: str, tmp_path: Path) -> Iterator[Deployment]:
    found = Deployment(broker, tmp_path)
    yield found
    found.close()


def test_the_points_are_found_in_the_code() -> None:
    assert {"runner.after_send", "transactor.after_offsets", "runner.after_commit"} <= set(POINTS)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_loses_and_repeats_nothing(deployment: Deployment, point: str) -> None:
    deployment.send(40)
    victim = deployment.start(f"{point}:2")
    assert victim.wait(PATIENCE_S) == -signal.SIGKILL, deployment.tell()
    deployment.start()
    deployment.send(40, again=20)
    deployment.wait()
    deployment.check()


@pytest.mark.parametrize("point", ["claims.before_rename", "claims.after_rename", "runner.after_send"])
def test_values_larger_than_their_topic_survive_a_kill_and_a_sweep(broker: str, tmp_path: Path, point: str) -> None:
    """Of the changelog's large values those that are in force stay, and nothing that a killed process left does."""
    (tmp_path / "logs").mkdir()
    deployment = Deployment(broker, tmp_path / "logs", claims=str(tmp_path / "claims"), pad=1_500_000)
    try:
        deployment.send(20)
        victim = deployment.start(f"{point}:6" if point.startswith("claims") else f"{point}:1")
        assert victim.wait(PATIENCE_S) == -signal.SIGKILL, deployment.tell()
        deployment.start()
        deployment.send(20, again=10)
        deployment.wait()
        deployment.check()
        swept = sweep(deployment.bus, deployment.namespace, ClaimStore(deployment.claims), -3600.0)
        assert swept.looked_at - swept.removed >= 7, "one large value a key is named by the changelog"
        deployment.verify()
        assert not list((tmp_path / "claims").rglob(f"{durable.DRAFT}*"))
    finally:
        deployment.close()


def test_a_zombie_that_wakes_after_its_successor_committed_writes_nothing(deployment: Deployment) -> None:
    deployment.send(40)
    frozen = deployment.start()
    deployment.wait()
    frozen.send_signal(signal.SIGSTOP)
    deployment.start()
    deployment.send(40)
    deployment.wait()
    frozen.send_signal(signal.SIGCONT)
    for _ in range(5):
        deployment.send(20, again=5)
        deployment.wait()
    deployment.check()


def test_processes_come_and_go_while_records_flow(deployment: Deployment) -> None:
    deployment.start()
    for _ in range(3):
        deployment.send(100, again=10)
        newcomer = deployment.start()
        deployment.send(100)
        deployment.wait()
        deployment.processes[-2].terminate()
        deployment.send(100, again=50)
        deployment.wait()
        newcomer.kill()
        deployment.start()
    deployment.wait()
    deployment.check()


def test_a_broker_that_dies_is_waited_for(tmp_path: Path) -> None:
    with Broker(tmp_path / "broker") as broker:
        broker.start()
        (tmp_path / "logs").mkdir()
        deployment = Deployment(broker.bootstrap, tmp_path / "logs")
        try:
            deployment.start()
            deployment.start()
            for _ in range(2):
                deployment.send(100, again=20)
                deployment.wait(deployment.sent - 60)
                broker.kill()
                broker.start()
                deployment.send(100, again=20)
                deployment.wait()
            deployment.check()
        finally:
            deployment.close()
