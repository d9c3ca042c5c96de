"""A deployment on this machine: its processes under one supervisor, its broker first, its topics before its stages."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from infra.bus.connect import connect
from infra.config import Settings
from infra.errors import ServiceError
from infra.services.broker import answers
from infra.services.leftovers import deployment_id
from infra.services.net import LOCALHOST, is_listening, wait_until
from infra.services.programs import BROKER, programs
from infra.services.supervisor import Supervisor


class Deployment:
    """What the settings ask for here. `environment` leads child processes to the same settings."""

    def __init__(self, settings: Settings, environment: Mapping[str, str]) -> None:
        self.settings = settings
        self.programs = programs(settings, environment)
        self.supervisor = Supervisor(settings.home, deployment_id(settings.namespace, settings.home))

    def up(self) -> list[int]:
        """Bring it up; gives ids of leftovers that were stopped. Raises ServiceError or TopicError when it cannot."""
        stopped: list[int] = []
        mark, policy = self.supervisor.folder / "policy", self.settings.policy.name
        running = self.supervisor.running()
        # An empty mark is of an `up` that was killed while it wrote.
        if running and mark.is_file() and (other := mark.read_text()) not in ("", policy):
            raise ServiceError(
                f"policy {other} runs from {self.settings.home}: "
                f"for {policy} beside it choose another home, for {policy} in its place run `millrace down` first"
            )
        if not self.settings.kafka.local:
            self.wait_for_broker()
        if not running:
            stopped = self.supervisor.up([])
            self._ports_are_free()
            self.supervisor.up([program for program in self.programs if program.name == BROKER])
        if self.settings.kafka.local:
            self.wait_for_broker()
        with connect(self.settings) as bus:
            bus.ensure_topics(self.settings.layout.specs())
        mark.write_text(policy)
        self.supervisor.up(self.programs)
        return stopped

    def wait_for_broker(self, timeout_s: float = 120) -> None:
        """Wait until the broker answers. Raises ServiceError for ours; for one that is not ours UnreachableError, or
        AccessError when it does not let us in.
        """
        kafka = self.settings.kafka
        if kafka.local:
            what = f"the broker at {kafka.bootstrap} (its log: {self.supervisor.logs / BROKER}.log)"
            wait_until(lambda: answers(kafka.bootstrap), what, timeout_s)
        else:
            from infra.bus.kafka_entry import contact

            contact(kafka.bootstrap, kafka.client_options(), timeout_s=15)

    def down(self) -> list[int]:
        """Take it down; gives ids of processes that the supervisor did not know."""
        return self.supervisor.down()

    def _ports_are_free(self) -> None:
        """Called when nothing of ours runs: whoever listens is another program."""
        s = self.settings
        asked = {"gateway.port": s.gateway.port}
        if s.kafka.local:
            asked["kafka.bootstrap"] = int(s.kafka.bootstrap.rpartition(":")[2])
        if s.engine.local:
            asked["engine.url"] = urlsplit(s.engine.url).port or 0
        for key, port in asked.items():
            if port and is_listening(LOCALHOST, port):
                self.supervisor.down()
                join = "; to use the broker there set [kafka] local = false" if key == "kafka.bootstrap" else ""
                raise ServiceError(f"another program listens on port {port}: choose another one with {key}{join}")
