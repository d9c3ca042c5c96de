"""Every command and every piece of Python of the documents, on one small real deployment, in the order of reading.

README's deployment is local: `millrace up` with a broker of its own. Where docs/operations.md goes on many machines,
each role is a process of its own before another broker, in a namespace of its own."""

from __future__ import annotations

import ast
import json
import os
import pty
import re
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
import pytest
import tomlkit

from millrace.apps.cli.roles import ROLES
from millrace.apps.demo import tiny
from millrace.consumers.tell.status import StatusWatch
from millrace.infra.local_keys import login
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.topics import full_name
from millrace.infra.machine.jars import cache_dir
from millrace.infra.process.net import LOCALHOST, free_ports
from millrace.schemas import codec
from millrace.trainers.weights import checkpoint
from tests.support.documents import DEPLOYMENT, ROOT, RUN_BY, Block, all_blocks, reading

PATIENCE_S = 240.0
PORT_OF_THE_DOCUMENTS = f"{LOCALHOST}:8900"


class Newcomer:
    """Runs commands as the documents show them, in `home`, on a deployment that is small by environment alone.
    `environment` is what this machine's settings are, besides the file."""

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


LOCAL, MANY = "dev", "many"
ROLE_COMMANDS = {f"millrace {role.name}" for role in ROLES}
MODULES = {"README.md": "my_agent", "tasks.md": "my_tools"}
"""page -> what the module with its agent is called"""
ALONE = {"training.md", "backends.md", "reading.md", "sql.md", "mcp.md", "rewards.md", "client.md"}
"""pages whose Python needs no deployment: tests of their own run it"""
OTHERWISE = {"tutorial.md", "imitate.md"}
"""pages that begin anew with a deployment of their own: `test_tutorial.py`, `test_imitate.py`"""
SAME = {"millrace why 0", "millrace policy create --model model"}
"""what such a page shows of commands that are typed here in another form"""
TASKS = 2000


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.timeout(2400)
def test_a_newcomer_reads_everything_and_types_it(tmp_path: Path, broker: str) -> None:
    checkpoint.export(tmp_path / "path" / "to" / "model", tiny.random_state(0))
    with newcomer(tmp_path) as one:
        walk = Walk(one, broker)
        for block in reading():
            if block.page in OTHERWISE:
                continue
            getattr(walk, block.language)(block)
    assert walk.typed == {command for command, runner in RUN_BY.items() if runner == DEPLOYMENT} - SAME
    assert walk.modules == {"my_agent", "my_tools", "my_rewards"}


class Walk:
    """What a newcomer does with each kind of block. `typed` is what was typed, `modules` what was saved and used."""

    def __init__(self, newcomer: Newcomer, broker: str) -> None:
        self.newcomer = newcomer
        self.broker = broker
        self.namespace = LOCAL
        self.typed: set[str] = set()
        self.modules: set[str] = set()
        shown, *_ = all_blocks("json")
        task = json.loads(shown.text)
        self.tasks = [task, *({**task, "id": f"{task['id']}-{n}"} for n in range(TASKS))]
        (newcomer.home / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.tasks))

    # ------------------------------------------------------------------ settings, tasks

    def toml(self, block: Block) -> None:
        """README's are for this deployment; the others are shown for themselves, and loaded by `test_docs.py`."""
        if block.page == "README.md":
            self.newcomer.edits(block.text)

    def text(self, block: Block) -> None:
        """What a command prints: the page's own test compares it."""

    def json(self, block: Block) -> None:
        """Tasks were written as shown before anything ran."""
        assert json.loads(block.text) in self.tasks

    # ------------------------------------------------------------------ Python

    def python(self, block: Block) -> None:
        if block.page in ALONE:
            return
        names = {
            node.name for node in ast.parse(block.text).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        if "agent" in names:
            self._save(MODULES[block.page], block)
        elif "verify" in names:
            self._save("my_rewards", block)
        else:
            self.newcomer.gateway_answers()
            self.newcomer.runs(block.text)

    def _save(self, module: str, block: Block) -> None:
        (self.newcomer.home / f"{module}.py").write_text(block.text)
        self.modules.add(module)

    # ------------------------------------------------------------------ commands

    def sh(self, block: Block) -> None:
        commands = [command for command in block.commands if RUN_BY[command] == DEPLOYMENT]
        if self.namespace == MANY and "millrace up" in commands:
            self._second_policy(commands)
            return
        if "millrace topics" in commands:
            self._move()
        self._type_all(commands)
        if self.newcomer.roles:
            self._settle()

    def _type_all(self, commands: list[str]) -> None:
        for command in commands:
            self.typed.add(command)
            self._type(command)

    def _type(self, command: str) -> None:
        if command in ROLE_COMMANDS:
            self.newcomer.starts(command)
        elif command == "millrace status --watch":
            self.newcomer.follows(command, lambda shown: bool(re.search(r"version +[1-9]", shown)))
        elif command == "millrace why case-4711":
            self._hears(command, "resolved as ")  # ready, or declined while the tasks' own groups fill the batches
        elif command == "millrace why ID":
            assert "ticket 0" in self.newcomer.types(command.replace("ID", "0"))
        else:
            self.newcomer.types(command)

    def _hears(self, command: str, word: str) -> None:
        """Ask until the answer has the word."""
        said: list[str] = []

        def heard() -> bool:
            said.append(self.newcomer.types(command, codes=(0, 1)))
            return word in said[-1]

        wait(heard, lambda: f"{word}; {command} says:\n{said[-1]}")

    def _move(self) -> None:
        """To many machines: nothing local runs, everything is told by the environment."""
        self.namespace = MANY
        self.newcomer.environment |= {
            "MILLRACE_NAMESPACE": MANY,
            "MILLRACE_OBJECTS": str(self.newcomer.home / "shared"),
            "MILLRACE_KAFKA__BOOTSTRAP": self.broker,
            "MILLRACE_KAFKA__LOCAL": "false",
            "MILLRACE_ENGINE__LOCAL": "false",
            "MILLRACE_GATEWAY__CAPTURE_DIR": str(self.newcomer.home / "capture"),
            "MILLRACE_ROLLOUT__AGENT": "my_tools:agent",
            "MILLRACE_REWARD__VERIFIER": "my_rewards:verify",
        }

    def _second_policy(self, commands: list[str]) -> None:
        """Another policy beside the first, in a home of its own: its engine is loaded and its gateway answers."""
        first, address = dict(self.newcomer.environment), self.newcomer.gateway
        gateway, engine = free_ports(2)
        self.newcomer.gateway = f"{LOCALHOST}:{gateway}"
        self.newcomer.environment |= {
            "MILLRACE_HOME": str(self.newcomer.home / "second"),
            "MILLRACE_SHARED": "false",
            "MILLRACE_POLICY__NAME": "second",
            "MILLRACE_ENGINE__LOCAL": "true",
            "MILLRACE_ENGINE__URL": f"http://{LOCALHOST}:{engine}",
            "MILLRACE_GATEWAY__PORT": str(gateway),
            "MILLRACE_GATEWAY__CAPTURE_DIR": "",
        }
        self._type_all(commands)
        self.newcomer.gateway_answers()
        self._hears("millrace status", f"engine-{LOCALHOST}:{engine}")
        self.newcomer.types("millrace down")
        self.newcomer.environment, self.newcomer.gateway = first, address

    def _settle(self) -> None:
        """The roles that a block started do their part; then they end well."""
        name = "policy"
        key = self.newcomer.home / ".millrace" / "keys" / "broker"
        options = login(key.read_text() if self.namespace == LOCAL else "")
        with KafkaBus(self.newcomer.environment["MILLRACE_KAFKA__BOOTSTRAP"], options) as bus:
            watch = StatusWatch(bus, self.namespace, name)
            try:
                if self.namespace == LOCAL:
                    wait_for(watch, _two_learners, "a version of two learners", self.newcomer.roles_run)
                else:
                    wait_for(watch, lambda w: w.version >= 2, "two versions by separate roles", self.newcomer.roles_run)
            finally:
                watch.close()
            if self.namespace == MANY:
                assert _sources(bus, full_name(MANY, f"{name}.trajectories")) == {"agent", "verifier"}
        codes = self.newcomer.ends_roles()
        assert set(codes.values()) <= {0, 143}, codes


def _two_learners(watch: StatusWatch) -> bool:
    return bool(watch.versions) and len(watch.versions[-1]["ranks"]) == 2


def _sources(bus: KafkaBus, topic: str) -> set[str]:
    """Who judged the samples."""
    found = set()
    for partition in range(bus.partitions(topic)):
        for record in bus.read(topic, partition):
            trajectory = codec.decode_as("Trajectory", record.value or b"")
            found |= {reward["source"] for reward in trajectory["rewards"]}
    return found
