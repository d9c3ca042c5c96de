"""A newcomer at a terminal: runs commands as the documents show them, in a directory of its own, on a small deployment.

Small by environment alone (the light engine, batches of two groups of two, free ports), so that every command is typed
as it is written. What `make setup` puts into the environment is found on PATH."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import tomlkit

from millrace.consumers.tell.status import StatusWatch
from millrace.infra.machine.jars import cache_dir
from millrace.infra.process.net import LOCALHOST, free_ports
from tests.support.documents import ROOT

PATIENCE_S = 240.0
PORT_OF_THE_DOCUMENTS = f"{LOCALHOST}:8900"


class Newcomer:
    """Lives in `home`. `environment` is what this machine's settings are, besides the file."""

    def __init__(self, home: Path) -> None:
        self.home = home
        broker, gateway, engine, warehouse = free_ports(4)
        self.gateway = f"{LOCALHOST}:{gateway}"
        self.roles: dict[str, subprocess.Popen[bytes]] = {}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
        self.environment = kept | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(home),
            "XDG_CACHE_HOME": str(cache_dir().parent),  # the broker's jars are there already
            "COLUMNS": "120",
            "MILLRACE_KAFKA__BOOTSTRAP": f"{LOCALHOST}:{broker}",
            "MILLRACE_KAFKA__HEAP_MB": "256",
            "MILLRACE_GATEWAY__PORT": str(gateway),
            "MILLRACE_ENGINE__URL": f"http://{LOCALHOST}:{engine}",
            "MILLRACE_WAREHOUSE__PORT": str(warehouse),
            "MILLRACE_ENGINE__KIND": "inprocess",
            "MILLRACE_POLICY__BATCH": "2",
            "MILLRACE_POLICY__GROUP_SIZE": "2",
            "MILLRACE_ROLLOUT__SAMPLING": '{"max_tokens": 8}',
            "MILLRACE_ROLLOUT__CONCURRENCY": "1",
        }

    def types(self, command: str, *, codes: tuple[int, ...] = (0,)) -> str:
        """Run a command to its end; gives what it printed. AssertionError when it ends with another code."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.home,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode in codes, f"{command} ends with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def follows(self, command: str, until: Callable[[str], bool]) -> str:
        """Watch a command that never ends at a terminal until it has shown something, then press ^C."""
        master, slave = pty.openpty()
        words = ["bash", "-c", f"exec {command}"]
        process = subprocess.Popen(words, cwd=self.home, env=self.environment, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        shown, deadline = "", time.monotonic() + PATIENCE_S
        try:
            while not until(shown):
                assert time.monotonic() < deadline, f"{command} shows:\n{shown[-3000:]}"
                shown += os.read(master, 65536).decode(errors="replace")
            process.send_signal(signal.SIGINT)
            deadline = time.monotonic() + PATIENCE_S
            while process.poll() is None:  # it still has a last word, and a terminal that nobody reads is soon full
                assert time.monotonic() < deadline, f"{command} does not end at ^C"
                if select.select([master], [], [], 0.1)[0]:
                    with suppress(OSError):
                        os.read(master, 65536)
            assert process.returncode == 0, f"{command} ends with {process.returncode} at ^C"
        finally:
            process.kill()
            process.wait()
            os.close(master)
        return shown

    def starts(self, command: str) -> None:
        """Run a role as a process of its own, until `ends_roles`."""
        name = command.split()[-1]
        with (self.home / f"{name}.log").open("ab") as log:
            words = ["bash", "-c", f"exec {command}"]
            self.roles[name] = subprocess.Popen(words, cwd=self.home, env=self.environment, stdout=log, stderr=log)

    def roles_run(self) -> None:
        """AssertionError with the log of a role that ended by itself."""
        for name, process in self.roles.items():
            assert process.poll() is None, f"{name} ended:\n{(self.home / f'{name}.log').read_text()[-3000:]}"

    def ends_roles(self) -> dict[str, int]:
        """SIGTERM to every role, the last started first; gives their exit codes."""
        codes = {}
        for name, process in reversed(self.roles.items()):
            process.terminate()
            codes[name] = process.wait(PATIENCE_S)
        self.roles.clear()
        return codes

    def edits(self, fragment: str) -> None:
        """Write a piece of settings into millrace.toml, where its tables are."""
        file = self.home / "millrace.toml"
        file.write_text(merged(file.read_text(), fragment))

    def runs(self, script: str) -> str:
        """Run a piece of Python as a program, our gateway in place of the default address."""
        file = self.home / "script.py"
        file.write_text(script.replace(PORT_OF_THE_DOCUMENTS, self.gateway))
        return self.types(f"python {file.name}")

    def gateway_answers(self) -> None:
        """Wait until agents can call."""
        wait(lambda: _healthy(f"http://{self.gateway}/health"), "the gateway answers", self.roles_run)


def merged(text: str, fragment: str) -> str:
    """Settings with the keys of a piece of settings under their headings."""
    document = tomlkit.parse(text)
    _merge(document, tomlkit.parse(fragment))
    return tomlkit.dumps(document)


@contextmanager
def newcomer(home: Path) -> Iterator[Newcomer]:
    """Whatever was started is gone at the end."""
    one = Newcomer(home)
    try:
        yield one
    finally:
        for process in one.roles.values():
            process.kill()
            process.wait()
        if (home / "millrace.toml").exists():
            subprocess.run(
                ["bash", "-c", "millrace down"], cwd=home, env=one.environment, check=True, timeout=PATIENCE_S
            )


def wait(
    reached: Callable[[], bool], what: str | Callable[[], str], meanwhile: Callable[[], Any] = lambda: None
) -> None:
    """Poll until it is so; `what` says what it is."""
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        meanwhile()
        assert time.monotonic() < deadline, f"not in time: {what if isinstance(what, str) else what()}"
        time.sleep(0.1)


def wait_for(
    watch: StatusWatch, reached: Callable[[StatusWatch], bool], what: str, meanwhile: Callable[[], Any]
) -> None:
    """Follow the topics until it is so."""

    def polled() -> bool:
        watch.poll(0.1)
        return reached(watch)

    wait(polled, what, meanwhile)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def _merge(into: Any, piece: Mapping[str, Any]) -> None:
    for key, value in piece.items():
        if isinstance(value, Mapping) and key in into:
            _merge(into[key], value)
        else:
            into[key] = value
