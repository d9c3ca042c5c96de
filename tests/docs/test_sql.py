"""docs/sql.md: what it asks is asked of the run that it was written from, and answers what the page shows."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millrace.apps.cli.context import console
from millrace.apps.cli.main import app
from millrace.consumers.warehouse.endpoint.serve import open_endpoint
from millrace.consumers.warehouse.questions import catalog, views
from millrace.consumers.warehouse.store.directory import TableDirectory
from millrace.infra.config import Settings, load
from millrace.infra.local_keys import USER
from millrace.infra.process.net import free_ports
from tests.support.documents import ROOT, RUN_BY, Block, blocks
from tests.support.eventful import eventful
from tests.support.filled import filled
from tests.support.players import POLICY

PAGE = ROOT / "docs" / "sql.md"
BLOCKS = blocks(PAGE)
SHOWN = [(block, answer) for block, answer in pairwise(BLOCKS) if (block.language, answer.language) == ("sh", "text")]
PYTHON = [block for block in BLOCKS if block.language == "python"]
PORT = str(Settings().warehouse.port)
SETTINGS = f'[policy]\nname = "{POLICY}"\n'

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with settings whose warehouse holds the run."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "millrace.toml").write_text(f'{SETTINGS}\n[warehouse]\nhome = "{folder / "tables"}"\n')
    with filled(eventful().bus, folder / "tables" / "dev"):
        pass
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # A console keeps the COLUMNS that it was made under.
        patch.setattr(console, "_width", None)
        patch.setenv("COLUMNS", "165")
        yield folder


@pytest.fixture
def port(home: Path) -> Iterator[int]:
    """Where the warehouse of that folder answers."""
    config = load()
    port = free_ports(1)[0]
    config = config.model_copy(update={"warehouse": config.warehouse.model_copy(update={"port": port})})
    with TableDirectory(config.warehouse_home) as directory:
        serving = open_endpoint(directory.handle, config)
        yield port
        serving.close()


def said(block: Block) -> str:
    """What the commands of a block say, one after the other."""
    answers = []
    for command in block.commands:
        done = CliRunner().invoke(app, shlex.split(command)[1:])
        assert done.exit_code == 0, f"{command}: {done.output}{done.exception!r}"
        answers.append("\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines()))
    return "\n\n".join(answers) + "\n"


MILLRACE = [(block, answer) for block, answer in SHOWN if block.text.startswith("millrace ")]


@pytest.mark.parametrize(("block", "answer"), MILLRACE, ids=[block.where for block, _ in MILLRACE])
def test_the_answer_on_the_page_is_the_answer(home: Path, block: Block, answer: Block) -> None:
    assert said(block) == answer.text, "write this answer into docs/sql.md"


def test_curl_gets_the_answer_on_the_page(port: int) -> None:
    ((block, answer),) = [(block, answer) for block, answer in SHOWN if "| curl " in block.text]
    command = block.text.replace(PORT, str(port))
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert found.stdout == answer.text


def test_clickhouse_connect_gets_the_answer_on_the_page(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    _, block = PYTHON
    answer = BLOCKS[BLOCKS.index(block) + 1]
    exec(block.text.replace(PORT, str(port)), {})
    assert capsys.readouterr().out == answer.text


def test_the_page_says_where_and_as_whom_clients_ask() -> None:
    text = PAGE.read_text()
    assert f"| port | `{PORT}`" in text
    assert f"| user | `{USER}` |" in text
    assert text.count(PORT) == text.count(f":{PORT}") + text.count(f"`{PORT}`") + text.count(f'"port": {PORT}')
    assert f'url: "http://127.0.0.1:{PORT}", username: "{USER}"' in text


def test_every_command_has_its_answer() -> None:
    assert [block for block in BLOCKS if block.language == "sh"] == [block for block, _ in SHOWN]
    assert {RUN_BY[command] for block, _ in SHOWN for command in block.commands} == {"tests/docs/test_sql.py"}


def test_the_page_names_every_view_and_asks_every_question() -> None:
    text = PAGE.read_text()
    assert [view.name for view in views.views() if f"| `{view.name}` |" not in text] == []
    assert [name for name in catalog.questions() if f"millrace ask {name}" not in text] == []


def test_the_python_draws_the_picture(home: Path) -> None:
    drawing, _ = PYTHON
    exec(drawing.text, {})
    drawn = (home / "sql.svg").read_text()
    kept = (ROOT / "docs" / "sql.svg").read_text()
    assert drawn.count("<use ") == kept.count("<use ")
    assert "<svg" in kept[:1000]
    assert len(kept) < 100_000
