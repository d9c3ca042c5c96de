"""One Apache Kafka broker (KRaft, combined controller) for a machine that has none: format, start, wait, stop.

Invariants: a data directory keeps its ports and cluster id for life, so a broker that was killed comes back under the
same address with everything that was acknowledged; formatting is done once and is safe to repeat after a kill; the
broker listens on localhost only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from infra.errors import ServiceError
from infra.services.jars import class_path
from infra.services.java import java
from infra.services.net import LOCALHOST, free_ports
from infra.services.process import Service

# The short timeouts let members and registrations of killed processes lapse in a second or two: with the defaults a
# killed broker is back after 11 s.
PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controller}
advertised.listeners=PLAINTEXT://{host}:{port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
controller.quorum.bootstrap.servers={host}:{controller}
log.dirs={data}
num.partitions=1
auto.create.topics.enable=false
default.replication.factor=1
min.insync.replicas=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
group.consumer.min.session.timeout.ms=1000
group.consumer.session.timeout.ms=6000
group.consumer.min.heartbeat.interval.ms=500
group.consumer.heartbeat.interval.ms=1000
transaction.abort.timed.out.transaction.cleanup.interval.ms=1000
log.cleaner.dedupe.buffer.size=2097152
log.cleaner.threads=1
num.network.threads=2
num.io.threads=4
num.recovery.threads.per.data.dir=2
background.threads=2
broker.session.timeout.ms=6000
broker.heartbeat.interval.ms=500
"""


class Broker(Service):
    """A broker whose whole state lives in `home`. `port` 0 takes a free one the first time and keeps it."""

    name = "broker"

    def __init__(self, home: Path, port: int = 0, heap_mb: int = 512) -> None:
        super().__init__(home)
        self.heap_mb = heap_mb
        self._wanted = port

    @property
    def properties(self) -> Path:
        return self.home / "server.properties"

    @property
    def scratch(self) -> Path:
        """Where Java puts temporary files; emptied by each `prepare`."""
        return self.home / "tmp"

    @property
    def bootstrap(self) -> str:
        """`host:port` for clients. Raises ServiceError before `prepare` wrote it."""
        match = re.search(r"^advertised\.listeners=PLAINTEXT://([^,\s]+)", self._text(), re.MULTILINE)
        if not match:
            raise ServiceError(f"{self.properties} names no listener: remove {self.home} and start again")
        return match.group(1)

    def prepare(self) -> None:
        """Fetch the jars, choose ports and format the data directory, each only where it is still to do."""
        self.home.mkdir(parents=True, exist_ok=True)
        # Libraries that Java unpacks are left behind by a kill: here they are found and removed.
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        class_path()
        if not self.properties.exists():
            port, controller = free_ports(2)
            draft = self.home / "server.properties.new"
            draft.write_text(self.configuration(self._wanted or port, controller))
            draft.rename(self.properties)
        elif self._wanted and not self.bootstrap.endswith(f":{self._wanted}"):
            raise ServiceError(
                f"the broker in {self.home} was made for {self.bootstrap}, not port {self._wanted}: keep "
                f"that port or remove it"
            )
        if not (self.home / "data" / "meta.properties").exists():
            identity = ["-t", self._cluster_id(), "-c", str(self.properties)]
            self._tool("format", "--standalone", "--ignore-formatted", *identity, *self.format_arguments())

    def configuration(self, port: int, controller: int) -> str:
        """What server.properties says when it is first written. Sibling brokers may say more, on later lines."""
        return PROPERTIES.format(host=LOCALHOST, port=port, controller=controller, data=self.home / "data")

    def format_arguments(self) -> list[str]:
        """More arguments for the storage tool, such as the first SCRAM users."""
        return []

    def command(self) -> list[str]:
        """The command line that runs the broker in the foreground, ready for a supervisor. SIGTERM ends it with code
        143.
        """
        flags = [
            f"-Xms{min(256, self.heap_mb)}m",
            f"-Xmx{self.heap_mb}m",
            f"-Djava.io.tmpdir={self.scratch}",
            "-XX:TieredStopAtLevel=1",
            "-XX:+UseSerialGC",
        ]
        flags += ["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.showDateTime=true"]
        flags += ["-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss,SSS"]
        return [str(java()), *flags, "-cp", self._class_path(), "kafka.Kafka", str(self.properties)]

    def ready(self) -> bool:
        return answers(self.bootstrap)

    def start(self, timeout_s: float = 180) -> None:
        """Start and wait until the broker answers for its metadata: seconds, or a minute on a busy machine."""
        super().start(timeout_s)

    def _text(self) -> str:
        try:
            return self.properties.read_text()
        except FileNotFoundError:
            raise ServiceError(f"there is no broker in {self.home} yet: start it first") from None

    def _cluster_id(self) -> str:
        """Kept before formatting begins: a format that was killed goes on with the same id."""
        path = self.home / "cluster.id"
        if not path.exists():
            draft = self.home / "cluster.id.new"
            draft.write_text(self._tool("random-uuid").strip())
            draft.rename(path)
        return path.read_text()

    def _tool(self, *arguments: str) -> str:
        command = [
            str(java()),
            "-Xmx64m",
            f"-Djava.io.tmpdir={self.scratch}",
            "-XX:TieredStopAtLevel=1",
            "-cp",
            self._class_path(),
            "kafka.tools.StorageTool",
            *arguments,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=self.home)
        if done.returncode:
            raise ServiceError(
                f"kafka.tools.StorageTool {arguments[0]} failed in {self.home}: "
                f"{(done.stdout + done.stderr).strip()[-1000:]}"
            )
        return done.stdout

    def _class_path(self) -> str:
        return os.pathsep.join(map(str, class_path()))


def answers(bootstrap: str, timeout_s: float = 1.0) -> bool:
    """Whether a broker there answers a metadata request on a plain listener now."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    quick: dict[str, Any] = {"bootstrap.servers": bootstrap, "log_level": 0, "reconnect.backoff.max.ms": 100}
    client = AdminClient(quick)
    try:
        return bool(client.list_topics(timeout=timeout_s).brokers)
    except KafkaException:
        return False
