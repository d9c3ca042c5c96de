"""Every command and every piece of Python of the documents, on one small real deployment, in the order of reading.

README's deployment is local: `millrace up` with a broker of its own. Where docs/operations.md goes on many machines,
each role is a process of its own before another broker, in a namespace of its own."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from millrace.apps.cli.roles import ROLES
from millrace.apps.demo import tiny
from millrace.consumers.tell.status import StatusWatch
from millrace.infra.local_keys import login
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.topics import full_name
from millrace.infra.process.net import LOCALHOST, free_ports
from millrace.schemas import codec
from millrace.trainers.weights import checkpoint
from tests.support.documents import DEPLOYMENT, RUN_BY, Block, all_blocks, reading
from tests.support.newcomer import Newcomer, newcomer, wait, wait_for

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
