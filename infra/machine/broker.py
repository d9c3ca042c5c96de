"""One Apache Kafka broker (KRaft, combined controller) for a machine that has none: format, start, wait, stop.

Invariants: a data directory keeps its ports and cluster id for life, so a broker that was killed comes back under the
same address with everything that was acknowledged; formatting is done once, and after a kill or a power cut the data
directory is formatted whole or not there; the broker listens on localhost only; a broker that may have to recover its
log is not started without room to do so (`ROOM`).
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from millrace.infra import durable
from millrace.infra.errors import ServiceError
from millrace.infra.local_keys import USER, login
from millrace.infra.machine import class_archive
from millrace.infra.machine.jars import class_path
from millrace.infra.machine.java import java
from millrace.infra.process.net import LOCALHOST, free_ports
from millrace.infra.process.service import Service

# The short timeouts let members and registrations of killed processes lapse in a second or two: with the defaults a
# killed broker is back after 11 s.
# An idle controller writes and syncs a record twice a second by default, a third of what an idle broker costs.
PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.listener.names=CONTROLLER
listeners={protocol}://{host}:{port},CONTROLLER://{host}:{controller}
advertised.listeners={protocol}://{host}:{port}
listener.security.protocol.map={protocol}:{protocol},CONTROLLER:{protocol}
inter.broker.listener.name={protocol}
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
metadata.max.idle.interval.ms=5000
broker.session.timeout.ms=6000
broker.heartbeat.interval.ms=500
"""

ROOM = 100 << 20
"""bytes that must be free on the disk for a start. After a kill Kafka reads its newest segments again and writes
indexes and snapshots beside them; where such a write fails for want of room it empties the whole segment, with all that
was acknowledged and synced (`LogLoader.recoverLog` catches IOException; seen with 4.4.0 and 32 KiB left)."""

# The same user on both listeners: for clients, and for the broker where it speaks with itself.
LOGIN_PROPERTIES = """\
sasl.enabled.mechanisms=PLAIN
sasl.mechanism.inter.broker.protocol=PLAIN
sasl.mechanism.controller.protocol=PLAIN
listener.name.sasl_plaintext.plain.sasl.jaas.config={login}
listener.name.controller.plain.sasl.jaas.config={login}
"""
LOGIN = (
    "org.apache.kafka.common.security.plain.PlainLoginModule required "
    'username="{user}" password="{password}" user_{user}="{password}";'
)


class Broker(Service):
    """A broker whose whole state lives in `home`. `port` 0 takes a free one the first time and keeps it. With a
    password it lets in nobody without; one that was made without one asks for it from its next start on."""

    name = "broker"

    def __init__(
        self, home: Path, port: int = 0, heap_mb: int = 512, password: str = "", *, sync: bool = False
    ) -> None:
        """`sync`: every record is on the disk before it is acknowledged, those of the broker's own topics too."""
        super().__init__(home)
        self.password = password
        self.heap_mb = heap_mb
        self.sync = sync
        self._wanted = port

    @property
    def properties(self) -> Path:
        return self.home / "server.properties"

    @property
    def _data(self) -> Path:
        return self.home / "data"

    @property
    def scratch(self) -> Path:
        """Where Java puts temporary files; emptied by each `prepare`."""
        return self.home / "tmp"

    @property
    def bootstrap(self) -> str:
        """`host:port` for clients. Raises ServiceError before `prepare` wrote it."""
        match = re.search(r"^advertised\.listeners=(?:SASL_)?PLAINTEXT://([^,\s]+)", self._text(), re.MULTILINE)
        if not match:
            raise ServiceError(f"{self.properties} names no listener: remove {self.home} and start again")
        return match.group(1)

    def prepare(self) -> None:
        """Fetch the jars, choose ports and format the data directory, each only where it is still to do. Raises
        ServiceError without `ROOM` on the disk."""
        self.home.mkdir(parents=True, exist_ok=True)
        # Libraries that Java unpacks are left behind by a kill: here they are found and removed.
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        class_path()
        self._check_room()
        if not self.properties.exists():
            port, controller = free_ports(2)
            self._write(self.configuration(self._wanted or port, controller))
        elif self._wanted and not self.bootstrap.endswith(f":{self._wanted}"):
            raise ServiceError(
                f"the broker in {self.home} was made for {self.bootstrap}, not port {self._wanted}: keep "
                f"that port or remove it"
            )
        elif self.password:
            _, controller = (int(number) for number in re.findall(r"//[^,\s:]+:(\d+)", self._line("listeners"))[:2])
            self._write(self.configuration(int(self.bootstrap.rpartition(":")[2]), controller))
        if not (self._data / "meta.properties").exists():
            self._format()

    def _check_room(self) -> None:
        space = shutil.disk_usage(self.home).free
        if space < ROOM:
            raise ServiceError(
                f"the disk of {self.home} has {space >> 20} MB free: below {ROOM >> 20} MB Kafka may empty topics when "
                "it starts, so it is not started. Make room; what is supervised then starts by itself"
            )

    def _format(self) -> None:
        """Format a draft, which gets its name once all of it is on the disk: the storage tool syncs only some files."""
        draft = self.home / "data-draft"
        shutil.rmtree(draft, ignore_errors=True)
        if self._data.is_dir() and any(self._data.iterdir()):
            raise ServiceError(
                f"{self._data} lacks its meta.properties: restore it, or remove {self.home} to begin anew"
            )
        settings = self.scratch / "format.properties"
        # The last line of a name counts.
        settings.write_text(f"{self._text()}\nlog.dirs={draft}\n")
        identity = ["-t", self._cluster_id(), "-c", str(settings)]
        self._tool("format", "--standalone", *identity, *self.format_arguments())
        settings.unlink()
        durable.name(draft, self._data)

    def configuration(self, port: int, controller: int) -> str:
        """What server.properties says when it is first written. Sibling brokers may say more, on later lines."""
        names = {"host": LOCALHOST, "port": port, "controller": controller, "data": self._data}
        if not self.password:
            return PROPERTIES.format(**names, protocol="PLAINTEXT")
        login = LOGIN.format(user=USER, password=self.password)
        return PROPERTIES.format(**names, protocol="SASL_PLAINTEXT") + LOGIN_PROPERTIES.format(login=login)

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
        return [*self._java(*flags), "kafka.Kafka", str(self.properties), *self._choices()]

    def _choices(self) -> list[str]:
        """What may change over the life of a data directory, on the command line and not in its file."""
        return ["--override", "log.flush.interval.messages=1"] if self.sync else []

    def is_ready(self) -> bool:
        return answers(self.bootstrap, options=login(self.password))

    def start(self, timeout_s: float = 180) -> None:
        """Start and wait until the broker answers for its metadata: seconds, or a minute on a busy machine."""
        super().start(timeout_s)

    def _write(self, text: str) -> None:
        durable.write(self.properties, text)

    def _line(self, name: str) -> str:
        match = re.search(rf"^{re.escape(name)}=(.*)$", self._text(), re.MULTILINE)
        return match[1] if match else ""

    def _text(self) -> str:
        try:
            return self.properties.read_text()
        except FileNotFoundError:
            raise ServiceError(f"there is no broker in {self.home} yet: start it first") from None

    def _cluster_id(self) -> str:
        """Kept before formatting begins: a format that was killed goes on with the same id."""
        path = self.home / "cluster.id"
        if not path.exists():
            durable.write(path, _random_id())
        return path.read_text()

    def _tool(self, *arguments: str) -> str:
        flags = ["-Xmx64m", f"-Djava.io.tmpdir={self.scratch}", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
        command = [*self._java(*flags), "kafka.tools.StorageTool", *arguments]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=self.home)
        if run.returncode:
            raise ServiceError(
                f"kafka.tools.StorageTool {arguments[0]} failed in {self.home}: "
                f"{(run.stdout + run.stderr).strip()[-1000:]}"
            )
        return run.stdout

    def _java(self, *flags: str) -> list[str]:
        """Java with Kafka on its class path, up to the name of what it runs."""
        jars = class_path()
        return [str(java()), *flags, *class_archive.flags(java(), jars), "-cp", os.pathsep.join(map(str, jars))]


def _random_id() -> str:
    """An id as the storage tool's `random-uuid` draws them, without a start of Java. One that began with a dash would
    be read as an option."""
    while (text := base64.urlsafe_b64encode(uuid4().bytes).decode().rstrip("=")).startswith("-"):
        """Drawn again."""
    return text


def answers(bootstrap: str, timeout_s: float = 1.0, options: Mapping[str, str] | None = None) -> bool:
    """Whether a broker there answers a metadata request now, of a client with these options."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    quick: dict[str, str | int | float | bool] = {"bootstrap.servers": bootstrap, "reconnect.backoff.max.ms": 100}
    quick["log_level"] = 0
    quick |= options or {}
    client = AdminClient(quick)
    try:
        return bool(client.list_topics(timeout=timeout_s).brokers)
    except KafkaException:
        return False
