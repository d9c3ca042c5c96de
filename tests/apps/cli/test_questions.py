"""`millrace ask`: what it lists, explains, refuses and answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pyarrow.parquet as parquet
import pytest
from typer.testing import CliRunner, Result

from millrace.apps.cli import questions
from millrace.apps.cli.main import app
from millrace.consumers.replay import sql_selection
from millrace.consumers.warehouse import client
from millrace.consumers.warehouse.questions import catalog
from millrace.infra.config import Settings
from millrace.infra.errors import QuestionError, WarehouseError
from tests.support.answers import Answers
from tests.support.eventful import BRANCH, eventful
from tests.support.filled import filled
from tests.support.players import POLICY

Ask = Callable[..., Result]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Ask as a user whose settings name the policy of the tests and an empty home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(questions.console, "width", 200)
    settings = ["--set", f"policy.name={POLICY}", "--set", f"home={tmp_path}"]
    return lambda *words: CliRunner().invoke(app, [*settings, "ask", *words])


def test_it_lists_every_question_with_its_help(ask: Ask) -> None:
    said = ask().stdout
    for question in catalog.questions().values():
        assert question.name in said
        assert question.doc in said
    assert "--version" in said
    assert "[--tenant]" in said
    helped = ask("--help").stdout
    assert all(name in helped for name in catalog.questions())


@pytest.mark.parametrize("name", catalog.questions())
def test_every_question_explains_itself(ask: Ask, name: str) -> None:
    said = " ".join(ask(name, "--help").stdout.replace("│", " ").split())
    question = catalog.questions()[name]
    assert question.doc in said
    for parameter in question.parameters:
        assert parameter.flag in said
        assert parameter.doc.split(",")[0] in said


def test_it_prints_the_query(ask: Ask) -> None:
    assert ask("compare", "--show-sql").stdout.strip() == catalog.questions()["compare"].sql


def test_it_refuses_what_it_cannot_ask(ask: Ask) -> None:
    for words, said in (
        (["trained-by"], "trained-by needs --version: which version"),
        (["compare", "--a", "1"], "compare needs --b"),
        (["trained-by", "--version", "-1"], "--version is a whole number"),
        (["funnel"], "there is no warehouse in"),
        (["nothing"], "No such command 'nothing'"),
        (["trained-by", "--version", "x"], "--version is a whole number (which version), not 'x'"),
        (["funnel", "--format", "table", "-o", "x"], "-o FILE needs --format"),
    ):
        done = ask(*words)
        assert done.exit_code in (1, 2)
        assert said in " ".join(done.output.replace("│", " ").split())


@pytest.mark.slow
def test_a_version_that_nobody_made_is_an_error_and_an_empty_answer_says_so(ask: Ask, tmp_path: Path) -> None:
    with filled(eventful().bus, tmp_path / "warehouse" / "dev"):
        pass
    for words, said in (
        (["trained-by", "--version", "99"], f"policy {POLICY} has no version 99, the newest is 8"),
        (["trained-by", "--version", "9", "-o", "rows.parquet"], f"policy {POLICY} has no version 9, the newest is 8"),
        (["compare", "--a", "1", "--b", "99"], f"policy {POLICY} has no version 99"),
        (["evaluated", "--version", "6", "--policy", BRANCH], f"policy {BRANCH} has no version 6, the newest is 5"),
        (
            ["trained-by", "--version", "1", "--policy", "x"],
            "policy x has no version in the warehouse; there are b, p:",
        ),
    ):
        done = ask(*words)
        assert done.exit_code == 1
        assert isinstance(done.exception, SystemExit | QuestionError)
        assert said in " ".join((done.output + str(done.exception)).split())
    assert not (tmp_path / "rows.parquet").exists()
    for words in (["trained-by", "--version", "0"], ["staleness-by-version", "--policy", BRANCH]):
        done = ask(*words)
        assert done.exit_code == 0
        assert "the answer has no rows" in done.output


def test_a_query_that_does_not_end_ends_the_command(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of `millrace sql` does."""
    given: list[object] = []

    def opened(settings: Settings, overdue: object = None) -> NoReturn:
        given.append(overdue)
        raise WarehouseError("enough")

    monkeypatch.setattr(client, "open_asking", opened)
    monkeypatch.setattr(sql_selection, "open_asking", opened)
    assert ask("funnel").exit_code == 1
    with pytest.raises(WarehouseError, match="enough"):
        sql_selection.question(Settings(), "SELECT 1")(None)  # type: ignore[arg-type]
    assert given == [client.leave, client.leave]


@pytest.mark.slow
def test_it_answers_from_the_directory_in_every_format(ask: Ask, tmp_path: Path) -> None:
    run = eventful()
    with filled(run.bus, tmp_path / "warehouse" / "dev"):
        pass
    expected = [row[:3] for row in Answers(run).trained_by(3)]
    table = ask("trained-by", "--version", "3").stdout.splitlines()
    assert table[0].split()[:3] == ["seq", "group", "sample"]
    assert [tuple(line.split()[:3]) for line in table[1:]] == [tuple(map(str, row)) for row in expected]
    rows = json.loads(ask("trained-by", "--version", "3", "--format", "json").stdout)
    assert [(row["seq"], row["group"], row["sample"]) for row in rows] == expected
    assert ask("trained-by", "--version", "3", "--format", "csv").stdout.splitlines()[0].startswith('"seq","group"')
    assert ask("trained-by", "--version", "3", "-o", "rows.parquet").exit_code == 0
    found = parquet.read_table(tmp_path / "rows.parquet")
    assert found.column("seq").to_pylist() == [row[0] for row in expected]
    assert found.column_names == list(rows[0])
