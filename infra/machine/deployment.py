"""A deployment on this machine: its processes under one supervisor, its broker first, its topics before its stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from millrace.infra import durable
from millrace.infra.config import Settings
from millrace.infra.connect import connect
from millrace.infra.errors import ServiceError
from millrace.infra.local_keys import kafka_options, make_keys
from millrace.infra.machine.broker import answers
from millrace.infra.machine.leftovers import deployment_id
from millrace.infra.machine.programs import BROKER, programs
from millrace.infra.machine.supervisor import Supervisor
from millrace.infra.process.net import LOCALHOST, is_listening, wait_until


class Deployment:
    """What the settings ask for here. `environment` leads child processes to the same settings."""

    def __init__(self, settings: Settings, environment: Mapping[str, str]) -> None:
        self.settings = settings
        self.programs = programs(settings, environment)
        self.supervisor = Supervisor(settings.home, deployment_id(settings.namespace, settings.home))

    def up(self) -> list[int]:
        """Bring it up; gives ids of leftovers that were stopped. Raises ServiceError or TopicError when it cannot."""
        make_keys(self.settings)
        leftovers: list[int] = []
        policy_file, policy = self.supervisor.folder / "policy", self.settings.policy.name
        running = self.supervisor.running()
        if running and policy_file.is_file() and (present := policy_file.read_text()) != policy:
            raise ServiceError(
                f"policy {present} runs from {self.settings.home}: "
                f"for {policy} beside it choose another home, for {policy} in its place run `millrace down` first"
            )
        if not self.settings.kafka.local:
            self.wait_for_broker()
        if not running:
            # First with nothing: leftovers end, so that a port that is taken then is another program's.
            leftovers = self.supervisor.up([])
            self._ports_are_free()
            self.supervisor.up([program for program in self.programs if program.name == BROKER])
        if self.settings.kafka.local:
            self.wait_for_broker()
        with connect(self.settings) as bus:
            bus.ensure_topics(self.settings.layout.specs())
        durable.write(policy_file, policy)
        self.supervisor.up(self.programs)
        return leftovers

    def wait_for_broker(self, timeout_s: float = 120) -> None:
        """Wait until the broker answers. Raises ServiceError for ours; for one that is not ours UnreachableError, or
        AccessError when it does not let us in.
        """
        kafka = self.settings.kafka
        if kafka.local:
            name = f"the broker at {kafka.bootstrap} (its log: {self.supervisor.logs / BROKER}.log)"
            wait_until(lambda: answers(kafka.bootstrap, options=kafka_options(self.settings)), name, timeout_s)
        else:
            from millrace.infra.log.kafka.entry import contact

            contact(kafka.bootstrap, kafka_options(self.settings), timeout_s=15)

    def down(self) -> list[int]:
        """Take it down; gives ids of processes that the supervisor did not know."""
        return self.supervisor.down()

    def _ports_are_free(self) -> None:
        """Called when nothing of ours runs: whoever listens is another program."""
        for advice in port_conflicts(self.settings):
            self.supervisor.down()
            raise ServiceError(advice)


def ports(settings: Settings) -> dict[str, int]:
    """Setting -> port of what a deployment starts here."""
    by_setting = {"gateway.port": settings.gateway.port}
    if settings.kafka.local:
        by_setting["kafka.bootstrap"] = int(settings.kafka.bootstrap.rpartition(":")[2])
    if settings.engine.local:
        by_setting["engine.url"] = urlsplit(settings.engine.url).port or 0
    if settings.warehouse.enabled and settings.shared:
        by_setting["warehouse.port"] = settings.warehouse.port
    if settings.otlp.enabled:
        by_setting["otlp.port"] = settings.otlp.port
    return {key: port for key, port in by_setting.items() if port}


def port_conflicts(settings: Settings) -> Iterator[str]:
    """What to do about each port that somebody listens on, where nothing of ours runs."""
    for key, port in ports(settings).items():
        if is_listening(LOCALHOST, port):
            join = "; to use the broker there set [kafka] local = false" if key == "kafka.bootstrap" else ""
            yield f"another program listens on port {port}: choose another one with {key}{join}"
