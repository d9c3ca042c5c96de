"""The one supervisor of a deployment on this machine: supervisord, configured from a list of programs.

It restarts what dies (at once after a healthy run, with growing pauses when starting fails), and answers over a Unix
socket that only this user can open. Invariants: the same list of programs gives the same configuration, and `up`
touches only what changed; programs inherit the environment, which is written nowhere, while flags are written to its
file, in a folder that only this user can open; at most one supervisor of a deployment runs, and `up` stops
leftovers of a killed supervisor, and restarts one whose environment holds other settings, because programs inherit it.
"""

from __future__ import annotations

import fcntl
import http.client
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast
from xmlrpc.client import Fault, ServerProxy, Transport

import psutil

from millrace.infra import durable
from millrace.infra.config import PREFIX
from millrace.infra.config.problems import RESERVED_NAMES
from millrace.infra.errors import ServiceError
from millrace.infra.machine import keeper, leftovers
from millrace.infra.process.net import socket_dir, wait_until
from millrace.infra.process.service import inherited_environment

LAST = ("broker",)
"""programs that the others need to end well"""
SAID_BYTES = 8000
"""end of a log that is searched for an error"""
WINDOW_S = 600.0
"""ends that are longer ago are forgiven"""
OUTLIVED_S = 60.0
"""a program that has run for so long, and longer than its lives before, is well again"""
LINE_CHARACTERS = 300
"""characters of a line that are shown"""
ERROR_WORDS = re.compile(r"\b(error|exception|fatal|critical|failed|cannot)\b|\w+(Error|Exception)\b", re.IGNORECASE)
TRACE = re.compile(r"^\s|^Traceback |^\s*File ")
UNSEEN = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Program:
    """One process to keep alive. `environment` is added to what it inherits: no secrets, it is written to a file.

    `revives` False lets it rest once it ended by itself with code 0. Who ends before `healthy_s` did not start, and the
    next try waits: less than a program needs to fail would let it run in circles."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    stop_s: int = 15
    revives: bool = True
    healthy_s: int = 10


@dataclass(frozen=True, slots=True)
class ProgramState:
    """One program as the supervisor sees it. `state` is supervisord's word: RUNNING, STARTING, BACKOFF, STOPPED, ...

    `ended`: how often it ended unasked of late; `failing`: whether it keeps ending, and then `said` is its error."""

    name: str
    state: str
    pid: int | None
    up_s: float
    said: str
    ended: int = 0
    failing: bool = False


class Supervisor:
    """The supervisor of one deployment, running or not. `environment` reaches every program through inheritance."""

    def __init__(self, home: Path, deployment: str, environment: Mapping[str, str] | None = None) -> None:
        self.home = home.absolute()
        self.deployment = deployment
        self.environment = dict(environment or {})

    @property
    def folder(self) -> Path:
        return self.home / "supervisor"

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def socket(self) -> Path:
        return socket_dir(self.home) / "supervisor"

    def running(self) -> bool:
        """Whether the supervisor of this deployment answers."""
        return self._present_deployment() == self.deployment

    def _present_deployment(self) -> str:
        """The deployment of the supervisor that answers from this home, empty when none does."""
        try:
            return str(self._call("supervisor.getIdentification"))
        except OSError:
            return ""

    def up(self, programs: Sequence[Program]) -> list[int]:
        """Bring exactly these programs up, starting the supervisor first where none runs.

        Gives the ids of leftover processes that were stopped. Raises ServiceError when the supervisor cannot start, or
        that of another deployment runs from the same home."""
        # Flags may hold what others must not see, and so may what programs print.
        for folder in (self.folder, self.logs):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise ServiceError(f"{folder} cannot be made: {error.strerror}: choose another home") from None
        with self._only_one():
            if (present := self._present_deployment()) not in ("", self.deployment):
                raise ServiceError(
                    f"deployment {present.partition(':')[0]} runs from {self.home}: choose another home for one beside "
                    f"it, for one in its place run `millrace down` first"
                )
            if self.running():
                if self._has_settings():
                    self._apply(programs)
                    return []
                self.down()
            leftover_ids = self._stop_leftovers()
            self._write(programs)
            with (self.folder / "output.log").open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "millrace.infra.machine.keeper", "-n", "-c", str(self._config)],
                    env=inherited_environment() | self.environment | {leftovers.DEPLOYMENT: self.deployment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

            self._remember(process.pid)

            def is_ready() -> bool:
                if process.poll() is not None:
                    tail = (self.folder / "output.log").read_text(errors="replace")[-1000:]
                    raise ServiceError(f"the supervisor ended with code {process.returncode}:\n{tail}")
                return self.running()

            wait_until(is_ready, "the supervisor", 120)
            return leftover_ids

    def down(self, last: Collection[str] = LAST, grace_s: float = 60) -> list[int]:
        """Stop every program (those in `last` after the others, which may need them to leave well), then the
        supervisor, then whatever is left of the deployment; gives ids of the latter."""
        remains: list[psutil.Process] = []
        if self.running():
            first = [state.name for state in self.states() if state.name not in last]
            for name in first:
                self.stop(name, wait=False)
            wait_until(lambda: not any(s.pid for s in self.states() if s.name in first), "the end of all", grace_s)
            pid = cast(int, self._call("supervisor.getPID"))
            # Whom the supervisor adopted, only the supervisor still knows; it ends the others itself.
            pids = {pid, *self.pids()}
            remains = [p for p in leftovers.find(self.deployment, sessions=[pid]) if p.pid not in pids]
            self._call("supervisor.shutdown")
            wait_until(lambda: not _is_alive(pid), "the end of the supervisor", grace_s)
            return leftovers.stop([*{*remains, *self._leftovers()}])
        return self._stop_leftovers(last)

    def pids(self) -> list[int]:
        """Ids of the programs that run now; none when no supervisor runs. Raises ServiceError when it is silent."""
        try:
            rows = cast(list[dict[str, Any]], self._call("supervisor.getAllProcessInfo"))
        except (ConnectionRefusedError, FileNotFoundError):
            return []
        except OSError as error:
            raise ServiceError(f"the supervisor at {self.socket} does not answer: {error}. Try again.") from None
        return [row["pid"] for row in rows if row["pid"]]

    def states(self) -> list[ProgramState]:
        """Every program, sorted by name; empty when no supervisor runs."""
        try:
            rows = cast(list[dict[str, Any]], self._call("supervisor.getAllProcessInfo"))
            ends = cast(dict[str, list[tuple[float, bool]]], self._call(f"{keeper.NAME}.ends"))
        except OSError:
            return []
        return [
            self._state(row, [End(*end) for end in ends.get(row["name"], [])])
            for row in sorted(rows, key=lambda row: row["name"])
        ]

    def _state(self, row: Mapping[str, Any], ends: Sequence[End]) -> ProgramState:
        up_s = max(0.0, row["now"] - row["start"]) if row["pid"] else 0.0
        is_failing = failing(row["statename"], up_s, ends, row["now"])
        text = row["spawnerr"] or row["description"]
        if is_failing:
            text = last_error(self.log_tail(row["name"], SAID_BYTES)) or text
        return ProgramState(row["name"], row["statename"], row["pid"] or None, up_s, text, len(ends), is_failing)

    def pid(self, name: str) -> int | None:
        """Process id of a program, None while it does not run."""
        return next((state.pid for state in self.states() if state.name == name), None)

    def restart(self, name: str) -> None:
        """Stop a program and start it again."""
        self.stop(name)
        self._call("supervisor.startProcess", name, False)

    def stop(self, name: str, wait: bool = True) -> None:
        """Stop a program; it stays stopped until `restart` or the next `up` of a fresh supervisor."""
        try:
            self._call("supervisor.stopProcess", name, wait)
        except Fault as fault:
            if fault.faultCode != _NOT_RUNNING:
                names = ", ".join(state.name for state in self.states())
                raise ServiceError(f"{name}: {fault.faultString}; programs: {names}") from fault

    def log_tail(self, name: str, size: int = 2000) -> str:
        """The last `size` bytes that a program printed."""
        try:
            with (self.logs / f"{name}.log").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - size))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def _has_settings(self) -> bool:
        """Whether the running supervisor's environment holds the settings that ours does."""
        environment = psutil.Process(cast(int, self._call("supervisor.getPID"))).environ()
        return settings_in(environment) == settings_in(inherited_environment() | self.environment)

    def left_alone(self) -> int:
        """How many processes of the deployment run on although their supervisor is gone, so that none would be started
        again; 0 while it lives."""
        return 0 if self.running() else len(self._leftovers())

    def _stop_leftovers(self, last: Collection[str] = LAST) -> list[int]:
        """End what a dead supervisor left, the roles in `last` after the others: who cannot say goodbye to the broker
        waits for it in vain, until it is killed. Gives their ids."""
        first = leftovers.stop(self._leftovers(skips=last))
        return [*first, *leftovers.stop(self._leftovers())]

    def _leftovers(self, skips: Collection[str] = ()) -> list[psutil.Process]:
        """Processes of the deployment that no living supervisor keeps. The id of the last one is its session's too."""
        try:
            pid, boot = self._session.read_text().split()
        except (OSError, ValueError):
            pid = boot = ""
        # Numbers of before a restart of the machine belong to others by now.
        sessions = [int(pid)] if pid.isdigit() and boot == _boot() else []
        return leftovers.find(self.deployment, sessions=sessions, skips=skips)

    @property
    def _session(self) -> Path:
        """Holds the id of the last supervisor. supervisord's own file is gone when it ends well."""
        return self.folder / "session"

    def _remember(self, pid: int) -> None:
        durable.write(self._session, f"{pid} {_boot()}")

    def _apply(self, programs: Sequence[Program]) -> None:
        self._write(programs)
        additions, changes, removals = cast(list[list[list[str]]], self._call("supervisor.reloadConfig"))[0]
        for name in [*changes, *removals]:
            self._call("supervisor.stopProcessGroup", name, True)
            self._call("supervisor.removeProcessGroup", name)
        for name in [*additions, *changes]:
            self._call("supervisor.addProcessGroup", name)

    @property
    def _config(self) -> Path:
        return self.folder / "supervisord.conf"

    def _write(self, programs: Sequence[Program]) -> None:
        sections = [
            f"[unix_http_server]\nfile={self.socket}\nchmod=0700",
            f"[supervisord]\nidentifier={_escape(self.deployment)}\nlogfile={self.folder}/supervisord.log\n"
            f"logfile_maxbytes=10MB\nlogfile_backups=1\npidfile={self.folder}/supervisord.pid\nnodaemon=true\n"
            "minfds=1024\nminprocs=50\nnocleanup=true\numask=077",
            "[rpcinterface:supervisor]\n"
            "supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface",
            f"[rpcinterface:{keeper.NAME}]\nsupervisor.rpcinterface_factory = {keeper.__name__}:make_ends",
            *map(self._section, programs),
        ]
        durable.write(self._config, "\n\n".join(sections) + "\n")

    def _section(self, program: Program) -> str:
        # Through env(1): supervisord's own `environment` cannot carry quotes.
        variables = {**program.environment, leftovers.ROLE: program.name}
        words = ["/usr/bin/env", *(f"{name}={value}" for name, value in sorted(variables.items())), *program.command]
        command = _escape(" ".join(map(shlex.quote, words)))
        autorestart = "true" if program.revives else "unexpected"
        # Pauses between failed starts grow by a second each.
        return (
            f"[program:{program.name}]\ncommand={command}\ndirectory={_escape(str(Path.cwd()))}\n"
            f"autostart=true\nautorestart={autorestart}\nexitcodes=0\nstartsecs={program.healthy_s}\nstartretries=100000\n"
            f"stopwaitsecs={program.stop_s}\nstopasgroup=false\nkillasgroup=true\nredirect_stderr=true\n"
            f"stdout_logfile={self.logs}/{program.name}.log\nstdout_logfile_maxbytes=20MB\nstdout_logfile_backups=1"
        )

    def _call(self, method: str, *arguments: object) -> object:
        """One request; OSError when nobody answers, Fault when the supervisor refuses."""
        proxy = ServerProxy("http://localhost", transport=_UnixTransport(self.socket), allow_none=True)
        call: Any = proxy
        for part in method.split("."):
            call = getattr(call, part)
        try:
            return cast(object, call(*arguments))
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error

    @contextmanager
    def _only_one(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


_NOT_RUNNING = 70


class _UnixTransport(Transport):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def make_connection(self, host: object) -> http.client.HTTPConnection:
        return _UnixConnection(self._path)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def settings_in(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are settings; what a supervisor tells each program itself is none."""
    reserves = {f"{PREFIX}{name}" for name in RESERVED_NAMES}
    return {name: value for name, value in environment.items() if name.startswith(PREFIX) and name not in reserves}


def _boot() -> str:
    """What tells one run of this machine from the next."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{psutil.boot_time():.0f}"


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _escape(text: str) -> str:
    """supervisord expands %(name)s, ends a value at a line break and takes ` ;` and ` #` for comments."""
    if any(part in text for part in ("\n", " ;", " #")):
        raise ServiceError(f"{text!r} cannot be passed through the supervisor: leave out line breaks, ' ;' and ' #'")
    return text.replace("%", "%%")


class End(NamedTuple):
    """One end that nobody asked for; `had_started`: after it had run long enough to count as started."""

    at: float
    had_started: bool


def failing(state: str, up_s: float, ends: Sequence[End], now: float) -> bool:
    """Whether a program keeps ending. `ends`: oldest first; `up_s`: how long it runs now, 0 when it does not.

    One end is an accident. A program that did not start, or ended twice within `WINDOW_S`, is failing until it outlives
    both a minute and the longest of its lives in between."""
    if state in ("BACKOFF", "FATAL"):
        return True
    recent = [end for end in ends if now - end.at < WINDOW_S]
    if not recent:
        return False
    if not recent[-1].had_started and state != "RUNNING":
        return True
    lives = [later.at - end.at for end, later in pairwise(recent)]
    return bool(lives) and up_s < max(OUTLIVED_S, min(max(lives), WINDOW_S / 2))


def last_error(log: str) -> str:
    """The newest line of a log that tells of an error, else its newest line; without what a terminal would obey."""
    lines = [line for line in (UNSEEN.sub("", raw).rstrip() for raw in log.splitlines()) if line.strip()]
    fault = next((line for line in reversed(lines) if ERROR_WORDS.search(line) and not TRACE.match(line)), None)
    return (fault or (lines[-1] if lines else "")).strip()[:LINE_CHARACTERS]
