"""The command line from outside: what it writes, shows and refuses, without any service."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

import millrace
from millrace.apps.cli import ask, context
from millrace.apps.cli.main import app
from millrace.apps.cli.roles import ROLES
from millrace.apps.cli.template import render
from millrace.consumers.tell.status import StatusWatch
from millrace.infra import connect
from millrace.infra.config import Settings, load
from millrace.infra.errors import UnreachableError
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.machine.supervisor import ProgramState
from millrace.infra.process.net import free_ports

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("words", [("--help",), ("export", "--help"), ("replay", "prove", "--help"), ("ask", "--help")])
def test_help_in_a_pipe_is_drawn_for_no_terminal(words: tuple[str, ...]) -> None:
    variables = {"FORCE_COLOR": "1", "GITHUB_ACTIONS": "1", "COLUMNS": "40", "TERMINAL_WIDTH": "40"}
    command = [sys.executable, "-m", "millrace.apps.cli.main", *words]
    got = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)
    said = got.stdout
    assert got.returncode == 0, got.stderr
    assert not re.search(r"[\x1b\u2500-\u257f]|\\\[|\[/?bold", said)
    assert "Show this message and exit." in said
    items = said.partition("\nOptions:\n")[2].replace("\n\nCommands:", "").split("\n")
    assert all(re.match(r"  (-|[a-z])", item) for item in items if item), "each option is one line"


def test_help_names_every_command() -> None:
    text = run(app, ["--help"]).output
    for name in (
        "demo",
        "init",
        "check",
        "doctor",
        "config",
        "up",
        "down",
        "status",
        "logs",
        "topics",
        "sweep",
        "policy",
        "audit",
        "why",
        "report",
        "replay",
        "sft",
        "dpo",
        "reward-model",
        "distill",
        "evaluate",
        "trajectory",
        "lineage",
        "export",
        "import",
    ):
        assert name in text
    for role in ROLES:
        assert role.name in text


def test_init_writes_a_private_file_that_says_the_defaults() -> None:
    assert run(app, ["init", "--policy", "sorter"]).exit_code == 0
    path = Path("millrace.toml")
    assert path.stat().st_mode & 0o077 == 0
    assert load().policy.name == "sorter"
    assert load() == load(flags={"policy.name": "sorter"})
    again = run(app, ["init"])
    assert again.exit_code == 1
    assert "--force" in again.stderr


def test_init_leaves_ports_to_who_has_them() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", Settings().gateway.port))
        other.listen()
        said = run(app, ["init"])
    assert load().gateway.port != Settings().gateway.port
    assert f"gateway.port, so this one is {load().gateway.port}" in said.output
    assert load() == load(flags={"gateway.port": load().gateway.port})


def test_up_in_the_folder_of_a_demo_says_where_its_settings_lie() -> None:
    Path(".millrace/demo").mkdir(parents=True)
    Path(".millrace/demo/millrace.toml").write_text("")
    said = run(app, ["up"])
    assert (said.exit_code, "cd .millrace/demo" in said.stderr) == (1, True)


def test_headings_that_were_pasted_twice_are_named_with_their_lines() -> None:
    Path("millrace.toml").write_text("[policy]\nbatch = 8\n\n[policy]\neta = 1\n")
    said = run(app, ["config"])
    assert said.exit_code == 1
    assert "[policy] stands in lines 1 and 4" in said.stderr


def test_help_loses_no_section_to_markup() -> None:
    """A name in brackets is markup, unless it is escaped."""
    for name, command in get_command(app).commands.items():
        for parameter in command.params:
            for section in re.findall(r"(?<!\\)\[(\w+)\]", getattr(parameter, "help", "") or ""):
                assert section not in Settings.model_fields, f"{name} {parameter.name}"


def test_help_that_is_no_terminal_s_has_no_markup() -> None:
    for command in (["reload"], ["engine"], ["engine", "join"]):
        said = run(app, [*command, "--help"])
        assert "\\[" not in said.stdout, command
        assert "[engine] url" in said.stdout, command


READABLE = (
    "status",
    "doctor",
    "why",
    "topics",
    "check",
    "audit",
    "config",
    "trajectory",
    "lineage",
    "export",
    "import",
)


@pytest.mark.parametrize("command", READABLE)
def test_what_people_look_at_can_be_read_by_programs(command: str) -> None:
    assert "--json" in [option for one in get_command(app).commands[command].params for option in one.opts]


def test_check_as_json() -> None:
    found = json.loads(run(app, ["--set", "learner.algorithm=grppo", "check", "--json"]).output)
    assert {one["question"]: one["word"] for one in found}["algorithm"] == "bad"


def test_doctor_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.apps.doctor._admin", _nobody)
    done = run(app, ["--set", "engine.local=false", "--set", "kafka.local=false", "doctor", "--json"])
    assert done.exit_code == 1
    assert {one["question"]: one["word"] for one in json.loads(done.output)}["broker"] == "bad"


def test_topics_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.infra.connect.connect", lambda _: MemoryBus())
    shown = json.loads(run(app, ["topics", "--json"]).output)
    assert {one["topic"] for one in shown} == {spec.name for spec in load().layout.specs()}
    assert shown[0].keys() == {"topic", "key", "partitions", "config", "what"}


def test_why_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = MemoryBus()
    bus.ensure_topics(load().layout.specs())
    monkeypatch.setattr("millrace.consumers.tell.command.history", lambda _: bus)
    done = run(app, ["why", "7", "--json"])
    told = json.loads(done.output)
    assert (done.exit_code, told["id"], told["known"]) == (1, "7", False)
    assert "Nothing is known of '7'" in told["said"][0]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("sta", "status"), ("audit --fi", "--files"), ("policy cre", "create"), ("--conf", "--config")],
)
def test_the_shell_completes_commands_and_options(typed: str, offered: str) -> None:
    words = {"COMP_WORDS": f"millrace {typed}", "COMP_CWORD": str(len(typed.split()))}
    done = run(app, [], env={"_MILLRACE_COMPLETE": "complete_bash"} | words, prog_name="millrace")
    assert done.output.split() == [offered]


@pytest.mark.parametrize("command", [["why", "7"], ["report"], ["audit"]])
@pytest.mark.parametrize("terminal", [True, False])
def test_who_waits_for_a_long_log_is_told_so_on_a_terminal_alone(
    command: list[str], terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = StringIO()
    monkeypatch.setattr(context, "console", Console(file=StringIO(), force_terminal=terminal))
    monkeypatch.setattr(context, "complain", Console(file=shown, force_terminal=terminal))
    monkeypatch.setattr(ask, "entry", lambda name: lambda *_, **__: ("", True) if "explain" in name else 0)
    assert run(app, command).exit_code == 0
    assert ("reading the log" in shown.getvalue()) == terminal


def test_every_commented_default_is_true() -> None:
    lines = render("dev", "policy").splitlines()
    shown = [line[1:] if line.startswith("#") and not line.startswith("# ") else line for line in lines]
    values = tomllib.loads("\n".join(shown))
    defaults = Settings().model_dump(mode="json")
    for name in ("kafka", "topics", "policy", "engine", "rollout", "reward", "governance", "learner", "telemetry"):
        assert values[name] == {key: value for key, value in defaults[name].items() if value is not None}, name
    assert set(values["gateway"]) == set(defaults["gateway"])


def test_config_masks_secrets() -> None:
    run(app, ["init"])
    shown = run(app, ["--set", "gateway.keys.me.key=hunter2", "config", "--json"])
    assert shown.exit_code == 0
    assert "hunter2" not in shown.output
    assert json.loads(shown.output)["gateway"]["keys"]["me"]["tenant"] == "local"
    assert "[gateway.keys.me]" in run(app, ["--set", "gateway.keys.me.key=hunter2", "config"]).output


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--set", "gateway.prot=1", "config"], 1, "did you mean port?"),
        (["--set", "gateway.port", "config"], 1, "section.key=value"),
        (["--config", "none.toml", "config"], 1, "millrace init"),
        (["--set", "namespace=a.b", "config"], 1, "namespace"),
        (["init", "--namespace", "a b"], 1, "--namespace 'a b'"),
        (["init", "--policy", ""], 1, "--policy ''"),
        (["--config", "/", "config"], 1, "/ cannot be read: Is a directory"),
        (["policy", "create", "--model", "none"], 2, "does not exist"),
        (["sft", "--model", "none", "--data", "none", "--out", "x"], 2, "does not exist"),
        (["--set", "home=/dev/null/x", "--set", "kafka.local=true", "up"], 1, "choose another home"),
        (["evaluate", "--tasks", "t", "--model", "nosuch"], 2, "does not exist"),
        (["up"], 1, "There is no millrace.toml here"),
        (["--set", "kafka.bootstrap=127.0.0.1:1", "status"], 1, ""),
        (["learnn"], 2, "No such command"),
        (["why"], 2, "Missing argument"),
    ],
)
def test_mistakes_are_one_line_and_a_code(arguments: list[str], code: int, says: str) -> None:
    result = run(app, arguments)
    assert result.exit_code == code
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_a_markup_like_error_is_shown_as_it_is() -> None:
    assert "[gateway] port" in run(app, ["--set", "gateway.port=x", "config"]).stderr


def test_bugs_are_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.apps.cli.setup.mask_values", lambda settings: 1 / 0)
    assert isinstance(run(app, ["config"]).exception, ZeroDivisionError)


def test_status_of_nothing() -> None:
    result = run(app, ["status"])
    assert result.exit_code == 1
    assert "millrace up" in result.output


def test_status_of_a_deployment_without_a_version_says_what_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = MemoryBus({"dev.policy.ledger": 1, "dev.policy.resolutions": 1, "dev.policy.weights": 1, "dev.workers": 1})
    running = [ProgramState("broker", "RUNNING", 5, 30.0, ""), ProgramState("learn-0", "STARTING", 6, 1.0, "")]
    monkeypatch.setattr("millrace.apps.cli.deploy._watch", lambda *_: StatusWatch(bus, "dev", "policy"))
    monkeypatch.setattr("millrace.infra.machine.supervisor.Supervisor.states", lambda _: running)
    result = run(app, ["status"])
    assert result.exit_code == 0, result.output
    for part in ("none yet", "awaited: learn-0 to start; version 0 (`millrace policy create", "learn-0  starting"):
        assert part in result.output
    told = json.loads(run(app, ["status", "--json"]).output)
    assert (told["learning"]["version"], len(told["awaited"])) == (None, 2)


def test_doctor_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.apps.doctor._admin", _nobody)
    result = run(app, ["--set", "engine.local=false", "--set", "kafka.local=false", "doctor"])
    assert result.exit_code == 1
    assert "✓ shared storage" in result.output
    assert "✗ broker: nobody" in result.output
    assert list((Path(".millrace") / "objects").iterdir()) == []


def test_what_is_not_started_yet_is_not_wrong() -> None:
    (port,) = free_ports(1)
    result = run(app, ["--set", "engine.local=false", "--set", f"kafka.bootstrap=127.0.0.1:{port}", "doctor"])
    assert result.exit_code == 0, result.output
    assert "! broker: not started yet" in result.output
    assert "millrace up" in result.output


def _nobody(settings: Settings) -> None:
    raise OSError("nobody")


def test_the_command_line_loads_no_heavy_library() -> None:
    """Nor the module of any command, nor the settings: what a command needs it loads itself."""
    heavy = ("torch", "transformers", "vllm", "faust", "pyarrow", "pydantic", "asyncio")
    light = tuple(f"millrace.apps.cli.{name}" for name in ("main", "context", "roles"))
    code = (
        "import sys, millrace.apps.cli.main\n"
        f"print([m for m in sys.modules if m in {heavy} or m.startswith('millrace.apps.cli.') and m not in {light}])"
    )
    root = Path(millrace.__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60, cwd=root
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", [["audit"], ["why", "7"], ["report"], ["status", "--json"]])
def test_who_only_looks_learns_soon_that_no_broker_is_there(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after the half minute that a role waits."""
    waited: list[float] = []

    def nobody(bootstrap: str, options: object, timeout_s: float) -> None:
        waited.append(timeout_s)
        raise UnreachableError("no broker answers there")

    monkeypatch.setattr("millrace.infra.log.kafka.entry.contact", nobody)
    done = run(app, ["--set", f"kafka.bootstrap=127.0.0.1:{free_ports(1)[0]}", *command])
    assert done.exit_code == 1
    assert "no broker answers" in done.output
    assert len(waited) == 1
    assert waited[0] <= 5


@pytest.mark.parametrize(("number", "said"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "read-only")])
def test_a_disk_that_takes_nothing_is_one_line(number: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(number, "no", "/somewhere")

    monkeypatch.setattr("millrace.apps.cli.deploy.Deployment", full)
    done = run(app, ["down"])
    assert done.exit_code == 1
    assert said in done.output
    assert "/somewhere" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prove"], "name the versions to prove"),
        (["prove", "3", "--load", "."], "name the versions to prove"),
        (["prove", "--load", ".", "--layout", "torch:d2"], "takes --anyway and --json alone"),
        (["prove", "--load", "."], "no dumped step"),
        (["prove", "3"], "answers"),
    ],
)
def test_replay_says_what_is_missing(words: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("MILLRACE_KAFKA__BOOTSTRAP", f"127.0.0.1:{port}")
    monkeypatch.setattr(connect, "PATIENCE_S", 0.2)  # nothing will answer
    done = run(app, ["replay", *words])
    assert done.exit_code == 1
    assert says in done.stderr


def test_the_home_of_the_environment_is_the_demos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    homes: list[Path] = []

    def stand_in(home: Path, *, seed: int, is_short: bool, kind: str | None) -> int:
        homes.append(home)
        return 0

    monkeypatch.setattr("millrace.apps.demo.run.run", stand_in)
    for environment, flags in (({}, []), ({"MILLRACE_HOME": "a"}, []), ({"MILLRACE_HOME": "a"}, ["--home", "b"])):
        assert run(app, ["demo", *flags], env=environment).exit_code == 0
    assert homes == [Path(".millrace/demo"), Path("a"), Path("b")]
