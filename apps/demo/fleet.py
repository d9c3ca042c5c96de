"""The programs of a deployment as one thing that can be brought up in parts, changed and taken down.

What the demo and the chaos run drive; `millrace up` and `down` do the same to a user's deployment.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from millrace.infra.config import Settings
from millrace.infra.local_keys import make_keys
from millrace.infra.machine.leftovers import deployment_id
from millrace.infra.machine.programs import BROKER, ENGINE, programs
from millrace.infra.machine.supervisor import Program, ProgramState, Supervisor

__all__ = ["BROKER", "ENGINE", "DemoFleet"]


class DemoFleet:
    """`file` is the settings file that every program reads; `environment` reaches every program."""

    def __init__(self, settings: Settings, file: Path, environment: Mapping[str, str] | None = None) -> None:
        make_keys(settings)
        self.deployment = deployment_id(settings.namespace, settings.home)
        self._supervisor = Supervisor(settings.home, self.deployment, environment)
        fleet_programs = programs(settings, {"MILLRACE_CONFIG": str(file.absolute())})
        self._programs = {program.name: program for program in fleet_programs}

    @property
    def logs(self) -> Path:
        return self._supervisor.logs

    @property
    def names(self) -> list[str]:
        """Programs that belong to the fleet, running or not."""
        return list(self._programs)

    def up(self, only: Collection[str] | None = None) -> None:
        """Bring up all programs, or exactly these."""
        self._supervisor.up([p for p in self._programs.values() if only is None or p.name in only])

    def add(self, name: str, like: str, environment: Mapping[str, str] | None = None) -> None:
        """Add one more program that runs what `like` runs, `environment` beside its own, and bring up all programs."""
        self.enlist(name, like, environment)
        self.up()

    def enlist(self, name: str, like: str, environment: Mapping[str, str] | None = None) -> None:
        """As `add`, for the next `up` to start it."""
        program = self._programs[like]
        variables = {**program.environment, **(environment or {})}
        self._programs[name] = replace(program, name=name, environment=variables)

    def remove(self, name: str) -> None:
        """Stop a program (SIGTERM first) and forget it."""
        del self._programs[name]
        self.up()

    def program(self, name: str) -> Program:
        return self._programs[name]

    def states(self) -> list[ProgramState]:
        return self._supervisor.states()

    def pid(self, name: str) -> int | None:
        return self._supervisor.pid(name)

    def down(self) -> None:
        """Stop everything, the supervisor and leftovers included. Safe to repeat."""
        self._supervisor.down()
