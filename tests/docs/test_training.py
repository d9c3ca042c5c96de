"""docs/training.md, typed from top to bottom: its Python, and each of its commands in one process."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millrace.apps.cli.main import app
from millrace.apps.demo import sort_digits
from millrace.infra import connect
from millrace.infra.process.net import LOCALHOST, free_ports
from millrace.trainers.weights import checkpoint, manifest
from tests.support import lessons
from tests.support.documents import ROOT, RUN_BY, TRAINING, blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = blocks(ROOT / "docs" / "training.md")
COMMANDS = [command for block in PAGE if block.language == "sh" for command in block.commands]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    lessons.untrained(home / "base")
    lessons.untrained(home / "big", seed=1)
    lessons.write(home / "lessons.jsonl", lessons.conversations(40))
    lessons.write(home / "pairs.jsonl", lessons.preferences(40))
    lessons.write(home / "rated.jsonl", lessons.ratings(40))
    sort_digits.write_tasks(home / "held-out.jsonl", 4, seed=0, evaluation=True)
    return home


@pytest.fixture(autouse=True)
def _there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("MILLRACE_KAFKA__BOOTSTRAP", f"{LOCALHOST}:{free_ports(1)[0]}")  # no broker runs there
    monkeypatch.setattr(connect, "PATIENCE_S", 0.2)


def test_a_step_takes_thirty_lines_and_writes_weights(home: Path) -> None:
    (block,) = [block for block in PAGE if block.language == "python"]
    assert len(block.text.splitlines()) <= 30
    names: dict[str, object] = {}
    exec(block.text, names)
    (path,) = (home / "versions").glob("v1-*")
    manifest.verify(path)
    before, after = checkpoint.adopt(home / "base"), checkpoint.read(path)
    assert after.step == 1
    assert any(not weight.equal(before.weights[name]) for name, weight in after.weights.items())


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_does_what_it_says(command: str) -> None:
    program, *words = shlex.split(command)
    assert (program, RUN_BY[command]) == ("millrace", TRAINING)
    done = CliRunner().invoke(app, words)
    # No broker runs here, and the page says what `evaluate` then does.
    said = [line for line in done.stderr.splitlines() if not line.startswith("The result is not recorded: no broker")]
    assert (done.exit_code, said) == (0, []), done.output
    assert bool(done.stderr) == (words[0] == "evaluate")
    if "--out" in words:
        (path,) = Path(words[words.index("--out") + 1]).glob("v*")
        manifest.verify(path)


def test_every_command_that_this_file_runs_is_on_the_page() -> None:
    assert {command for command, runner in RUN_BY.items() if runner == TRAINING} == set(COMMANDS)
