"""docs/tutorial.md, up to the point where services start: its Python runs, its settings load, and `check` says what the
page says. The commands behind that are run by the tests that `RUN_BY` names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from millrace.apps.cli.main import app
from millrace.apps.demo import tiny
from millrace.trainers.weights import checkpoint
from tests.support.documents import ROOT, Block, blocks

PAGE = ROOT / "docs" / "tutorial.md"
SAVED = re.findall(r"[Ss]ave this as `(\w+\.py)`", PAGE.read_text())
MAKER = "python -m millrace.apps.demo.tiny"
PYTHON = [block for block in blocks(PAGE) if block.language == "python"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which everything was saved as the page says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, block in zip(SAVED, PYTHON, strict=True):
        (tmp_path / name).write_text(block.text)
    return tmp_path


def run(block: Block) -> None:
    exec(block.text, {})


@pytest.mark.slow
def test_what_is_saved_passes_the_check_with_the_words_of_the_page(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "make_sort_policy", lambda path, *_, **__: checkpoint.export(path, tiny.random_state(0)))
    maker = typer.Typer()
    maker.command()(tiny.main)
    (command,) = [
        each for block in blocks(PAGE) if block.language == "sh" for each in block.commands if each.startswith(MAKER)
    ]
    assert CliRunner().invoke(maker, shlex.split(command.removeprefix(MAKER))).exit_code == 0
    run(PYTHON[SAVED.index("make_tasks.py")])
    assert (home / "model" / "config.json").is_file()
    invoke = CliRunner().invoke
    assert invoke(app, ["init"]).exit_code == 0
    (settings,) = [block.text for block in blocks(PAGE) if block.language == "toml"]
    (home / "millrace.toml").write_text(settings)
    done = invoke(app, ["check"])
    assert done.exit_code == 0, done.output
    assert done.output.count("✓") == 4
    for question, said in re.findall(r"^\| ✓ (\w+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE):
        if question != "tasks":  # whose path differs
            assert f"✓ {question}: {said}" in done.output


def test_every_word_is_explained_before_a_later_section_uses_it() -> None:
    text = PAGE.read_text()
    words = re.findall(r"\*\*(\w+)\*\*", text)
    assert {"task", "agent", "episode", "verifier", "reward", "policy", "version", "group", "batch", "ticket"} <= {
        *words
    }
    body = text.partition("## 2.")[2]
    for word in ("ticket", "reward", "batch", "group", "learner", "gateway", "engine"):
        first = re.search(rf"\b{word}s?\b", body)
        assert first is not None
        assert body[first.start() - 2 : first.start()] == "**", word
