"""The command line from outside: what it writes, shows and refuses, without any service."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import infra
from infra.cli.main import app
from infra.cli.roles import ROLES
from infra.cli.template import render
from infra.config import Settings, load
from infra.services.net import free_ports

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_help_names_every_command() -> None:
    text = run(app, ["--help"]).output
    for name in (
        "demo",
        "init",
        "doctor",
        "config",
        "up",
        "down",
        "status",
        "topics",
        "sweep",
        "policy",
        "audit",
        "why",
        "report",
        "sft",
        "dpo",
        "reward-model",
        "distill",
        "evaluate",
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


def test_every_commented_default_is_true() -> None:
    lines = render("dev", "policy").splitlines()
    shown = [line[1:] if line.startswith("#") and not line.startswith("# ") else line for line in lines]
    values = tomllib.loads("\n".join(shown))
    defaults = Settings().model_dump(mode="json")
    for name in ("kafka", "topics", "policy", "engine", "rollout", "reward", "governance", "learner", "telemetry"):
        assert values[name] == defaults[name], name
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
    monkeypatch.setattr("infra.cli.setup.masked", lambda settings: 1 / 0)
    assert isinstance(run(app, ["config"]).exception, ZeroDivisionError)


def test_status_of_nothing() -> None:
    result = run(app, ["status"])
    assert result.exit_code == 1
    assert "millrace up" in result.output


def test_doctor_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.doctor._admin", _nobody)
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
    code = (
        "import sys, infra.cli.main; print([m for m in ('torch', 'transformers', 'vllm', 'faust') if m in sys.modules])"
    )
    root = Path(infra.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60, cwd=root
    )
    assert done.stdout.strip() == "[]"
