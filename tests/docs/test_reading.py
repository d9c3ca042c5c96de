"""docs/reading.md, typed from top to bottom over a whole world in memory: its commands, its Python, its picture."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millrace.apps.cli.main import app
from millrace.consumers.tell import command as showing
from millrace.formats.exports import run as exporting
from millrace.formats.layouts import WRITERS
from tests.docs import shown
from tests.support.documents import READING, ROOT, RUN_BY, blocks
from tests.support.history_log import NS
from tests.support.history_records import POLICY
from tests.support.house import modules

PAGE = ROOT / "docs" / "reading.md"
COMMANDS = [command for block in blocks(PAGE) if block.language == "sh" for command in block.commands]
WORLD = shown.world()
run = CliRunner().invoke


class _Open:
    """A bus that is open already."""

    def __enter__(self) -> Any:
        return WORLD.bus

    def __exit__(self, *_: object) -> None:
        return None


@pytest.fixture(autouse=True)
def _there(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("reading"))
    named = {"NAMESPACE": NS, "POLICY__NAME": POLICY, "POLICY__TENANT": "local"}
    for name, value in named.items():
        monkeypatch.setenv(f"MILLRACE_{name}", value)
    for module in (exporting, showing):
        monkeypatch.setattr(module, "history", lambda settings: _Open())


def words(command: str) -> list[str]:
    """What is typed, with an id and a task of this world."""
    assert RUN_BY[command] == READING
    sample = next(row for _, row in WORLD.rows("trajectories") if row["id"] == shown.withheld(WORLD))
    said = command.replace("ID", sample["id"]).replace("TASK", sample["task_id"])
    return shlex.split(said)[1:]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_does_what_it_says(command: str) -> None:
    done = run(app, words(command))
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    if "export" in command:
        out = Path(words(command)[words(command).index("-o") + 1])
        manifest = json.loads(Path(f"{out}.manifest.json").read_text())
        assert manifest["rows"] > 0
        assert f"wrote {out}: {manifest['exported']} of {manifest['read']} trajectories" in done.output
    elif "--page" in command:
        assert "</html>" in Path("trajectory.html").read_text()
        assert Path("trajectory.html").stat().st_mode & 0o077 == 0
    else:
        assert shown.withheld(WORLD) in done.output or "lineage 3" in command


def test_the_python_reads_what_was_exported() -> None:
    assert run(app, words("millrace export --layout hf -o history")).exit_code == 0
    (block,) = [block for block in blocks(PAGE) if block.language == "python"]
    names: dict[str, Any] = {}
    exec(block.text, names)
    assert len(names["rows"]) > 10


def test_what_was_refused_is_said(tmp_path: Path) -> None:
    done = run(app, ["export", "--layout", "trl-preference", "-o", str(tmp_path / "pairs")])
    assert done.exit_code == 0, done.output
    assert re.search(r"refused as ineligible: \d+, for instance trajectory-\w+: reply", done.output)
    again = run(app, ["export", "--layout", "trl-preference", "-o", str(tmp_path / "pairs")])
    assert (again.exit_code, "there already" in again.stderr) == (1, True)


def test_programs_can_read_all_three() -> None:
    id = shown.withheld(WORLD)
    assert json.loads(run(app, ["trajectory", id, "--json"]).output)["id"] == id
    assert json.loads(run(app, ["lineage", "3", "--json"]).output)["version"] == 3
    done = run(app, ["export", "--layout", "jsonl", "-o", "out", "--json"])
    assert json.loads(done.output) == json.loads(Path("out.manifest.json").read_text())


@pytest.mark.parametrize("command", ["trajectory", "lineage"])
def test_what_nobody_knows_or_several_bear_is_one_error(command: str) -> None:
    for wanted, said in (("nobody", "nothing is known"), ("ticket-0", "names 2 trajectories")):
        done = run(app, [command, wanted])
        assert (done.exit_code, said in done.stderr) == (1, True), done.stderr


def test_another_policy_has_trajectories_of_its_own() -> None:
    done = run(app, ["export", "--layout", "jsonl", "-o", "out", "--policy", "other"])
    assert (done.exit_code, "0 of 0 trajectories" in done.output) == (0, True), done.output


def test_the_table_and_the_help_have_every_layout() -> None:
    rows = re.findall(r"^\| (`[^|]*) \| an? [a-z ]+ \|", PAGE.read_text(), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} == set(WRITERS)
    told = run(app, ["export", "--help"], env={"COLUMNS": "400"}).output
    assert set(WRITERS) <= set(re.findall(r"[\w-]+", told))


def test_the_page_names_every_reason_that_it_explains() -> None:
    code = "".join(path.read_text() for path in modules("formats", "dialects"))
    known = set(re.findall(r'Unsayable\(\s*"(\w+)"', code))
    (named,) = re.findall(r"is refused by name: (.*?), and others", PAGE.read_text())
    assert set(re.findall(r"`(\w+)`", named)) <= known


def test_the_picture_is_what_the_command_shows() -> None:
    assert shown.FILE.read_text() == shown.picture(), "run .venv/bin/python -m tests.docs.shown"
    assert not re.search(r"https?://(?!www\.w3\.org)", shown.FILE.read_text())
