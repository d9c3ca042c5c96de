"""A real deployment to break: started by the supervisor, watched through its topics, audited at the end.

Between two faults at least one version must be committed: `settle` waits for it. Nothing is judged here but progress;
whether anything was lost or doubled is the audit's to say.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomlkit

from millrace.apps.demo.fleet import DemoFleet
from millrace.consumers.tell.status import StatusWatch
from millrace.infra import durable
from millrace.infra.config import Settings, load
from millrace.infra.connect import connect
from millrace.infra.log.base import Bus
from millrace.infra.log.topics import full_name, stages_of
from millrace.infra.machine import leftovers

PATIENCE_S = 180.0
START_S = 600.0
"""patience with a deployment that starts, vLLM among it"""
NUDGE_S = 10.0

AT_START = ("_fence", ".after_restore")
"""last words of kill points that are passed when a process starts, or comes to own more, and at no other time"""
PASSED_BY = {
    "capture": "gateway",
    "checkpoint": "learn-0",
    "forwarder": "gateway",
    "learner": "learn-0",
    "loader": "rollout-0",
    "reloader": "reload",
    "rollout": "rollout-0",
    "runner": "seal",
    "transactor": "dispatch",
}
"""first word of a kill point -> a program that passes it when it starts, if not in its daily work; points of the other
ways of weights to engines are passed by every version, and not listed"""


class Stuck(AssertionError):
    """No version was committed for too long after a fault."""


class Arena:
    """One deployment in `home` whose settings file is already there; `say` gets a line for each fault."""

    def __init__(self, home: Path, seed: int, say: Callable[[str], None] = print) -> None:
        self.kill_dir = home / "kill"
        self.fleet = fleet_of(home)
        self.settings: Settings = load(home / "millrace.toml")
        self.bus: Bus = connect(self.settings)
        self.watch = StatusWatch(self.bus, self.settings.namespace, self.settings.policy.name)
        self.random = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.slowest: dict[str, float] = {}
        self._say = say

    def close(self) -> None:
        self.watch.close()
        self.bus.close()

    # ---- waiting

    def wait(self, reached: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Watch the topics until `reached`. Raises Stuck."""
        deadline = time.monotonic() + timeout_s
        while not reached():
            self.watch.poll(0.2)
            if time.monotonic() > deadline:
                states = ", ".join(f"{s.name} {s.state}" for s in self.fleet.states())
                raise Stuck(f"{what}: not after {timeout_s:.0f} s, at version {self.watch.version}; {states}")

    def settle(self, versions: int = 1, timeout_s: float = PATIENCE_S) -> None:
        """Wait for the next committed version."""
        self.watch.poll(0.0)
        beyond = self.watch.version + versions
        self.wait(lambda: self.watch.version >= beyond, f"version {beyond}", timeout_s)

    def after(self, *faults: str) -> None:
        """Wait until learning has gone on, and count the faults that it went on after. Raises Stuck, naming them."""
        at = time.monotonic()
        try:
            self.settle()
        except Stuck as stuck:
            raise Stuck(f"after {', '.join(faults)}: {stuck}") from None
        took = time.monotonic() - at
        for fault in faults:
            self.faults[fault] += 1
            self.slowest[fault] = max(took, self.slowest.get(fault, 0.0))
        self._say(f"{', '.join(faults)}: version {self.watch.version} {took:.1f} s later")

    # ---- faults

    def kill_points(self, names: Sequence[str], timeout_s: float) -> list[str]:
        """Kill -9 the first process that passes each of the named points, all in one round. Gives those that no process
        passed in time.

        Some points are passed at a start only, and others rarely: a process of that kind is made to start, at once or
        after a while."""
        armed = {name: self.kill_dir / name for name in names}
        for file in armed.values():
            file.touch()
        began = time.monotonic()
        deadline = began + timeout_s
        nudges = {name: began if name.endswith(AT_START) else began + NUDGE_S for name in names}
        while (left := [name for name in names if armed[name].exists()]) and time.monotonic() < deadline:
            self.watch.poll(0.1)
            due = [name for name in left if time.monotonic() > nudges[name] and armed[name].exists()]
            for program in sorted({PASSED_BY.get(name.partition(".")[0], "") for name in due} - {""}):
                self._signal(program, signal.SIGKILL)
            nudges |= dict.fromkeys(due, time.monotonic() + 3 * NUDGE_S)
        missed = [name for name in left if self._disarmed(armed[name])]
        passed = [name for name in names if name not in missed]
        if passed:
            self.after(*(f"point {name}" for name in passed))
        return missed

    def _disarmed(self, file: Path) -> bool:
        """Whether a point was still armed."""
        try:
            file.unlink()
        except FileNotFoundError:
            return False
        return True

    def kill(self, program: str) -> None:
        """Kill -9 one program's process; the supervisor starts it again."""
        self._signal(program, signal.SIGKILL)
        self.after(f"kill {program.split('-')[0]}")

    def kill_supervisor(self) -> None:
        """Kill -9 the supervisor, then bring the deployment up as a user would."""
        mine = [
            p for p in leftovers.find(self.fleet.deployment) if "millrace.infra.machine.keeper" in " ".join(p.cmdline())
        ]
        assert len(mine) == 1, "there is one supervisor"
        mine[0].kill()
        mine[0].wait(60)
        self.fleet.up()
        self.after("kill supervisor")

    def freeze(self, program: str, kind: str) -> None:
        """SIGSTOP a process until its successor has gone on, then wake it: a zombie that believes it still leads."""
        pid = self._signal(program, signal.SIGSTOP)
        try:
            self.after(f"freeze {kind}")
        finally:
            os.kill(pid, signal.SIGCONT)
        self.settle()

    def join(self, name: str, like: str) -> None:
        self.fleet.add(name, like)
        self.after(f"join {like.split('-')[0]}")

    def leave(self, name: str) -> None:
        self.fleet.remove(name)
        self.after(f"leave {name.split('-')[0]}")

    def _signal(self, program: str, number: int) -> int:
        signalled: list[int] = []

        def signal_it() -> bool:
            pid = self.fleet.pid(program)
            with suppress(ProcessLookupError):  # it ended since it was asked for
                if pid is not None:
                    os.kill(pid, number)
                    signalled.append(pid)
            return bool(signalled)

        self.wait(signal_it, f"a process of {program}")
        return signalled[0]

    # ---- who leads

    def leader(self) -> str | None:
        """The program that is rank 0 of the learners, by the newest ledger entry; None when it is gone already."""
        members = self.bus.group(full_name(self.settings.namespace, f"{self.settings.policy.name}.learn")).members
        member = self.watch.versions[-1]["leader"]
        client = next((m.client_id for m in members if m.member_id == member), "")
        by_pid = {w["pid"]: (w["url"] or "").removeprefix("tcp://") for w in self.watch.workers.values()}
        pids = {s.pid: s.name for s in self.fleet.states()}
        return next((pids[pid] for pid, url in by_pid.items() if url and url in client and pid in pids), None)

    def owner(self, stage: str) -> str | None:
        """The program that owns slot 0 of a stage."""
        name = stages_of(self.settings.policy.name)[stage]
        members = self.bus.group(f"{self.settings.namespace}.{name}").members
        client = next((m.client_id for m in members if any(slot == 0 for _, slot in m.partitions)), "")
        return next((s.name for s in self.fleet.states() if s.pid and client == f"{name}-{s.pid}"), None)


def fleet_of(home: Path) -> DemoFleet:
    """The programs of the deployment in `home`, each of which a point in `home/kill` may end."""
    points, file = home / "kill", home / "millrace.toml"
    points.mkdir(parents=True, exist_ok=True)
    return DemoFleet(load(file), file, {"MILLRACE_KILL_DIR": str(points)})


def write_settings(home: Path, values: dict[str, Any]) -> Path:
    """`home/millrace.toml` from dotted names."""
    document = tomlkit.document()
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        if section and section not in document:
            document[section] = tomlkit.table()
        table: Any = document[section] if section else document
        table[key] = value
    home.mkdir(parents=True, exist_ok=True)
    file = home / "millrace.toml"
    durable.write(file, tomlkit.dumps(document))
    return file
