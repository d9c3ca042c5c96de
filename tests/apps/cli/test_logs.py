"""`millrace logs`: of processes of this machine, now and as they go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from millrace.apps.cli import logs
from millrace.apps.cli.main import app

run = CliRunner().invoke


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the logs of a deployment in this folder lie."""
    monkeypatch.chdir(tmp_path)
    made = tmp_path / ".millrace" / "logs"
    made.mkdir(parents=True)
    return made


def test_the_newest_lines_of_each_process(folder: Path) -> None:
    (folder / "seal.log").write_text("old\nnew \x1b[2J[bold]\n")
    (folder / "learn-0.log").write_text("step\n")
    assert run(app, ["logs", "-n", "1"]).output.splitlines() == ["learn-0  step", "seal  new \u241b[2J[bold]"]
    assert run(app, ["logs", "learn"]).output.splitlines() == ["learn-0  step"]


def test_what_is_not_there_is_said(folder: Path) -> None:
    nothing = run(app, ["logs"])
    assert (nothing.exit_code, "`millrace up`" in nothing.output) == (1, True)
    (folder / "seal.log").touch()
    other = run(app, ["logs", "sael"])
    assert (other.exit_code, "there are seal" in other.output) == (1, True)


def test_they_are_followed_until_somebody_ends_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = folder / "seal.log"
    log.write_text("one\n")
    coming = ["two\n", "three\n"]

    def pause(seconds: float) -> None:
        if not coming:
            raise KeyboardInterrupt
        with log.open("a") as file:
            file.write(coming.pop(0))

    monkeypatch.setattr(logs, "sleep", pause)
    done = run(app, ["logs", "-f", "seal"])
    assert done.output.splitlines() == ["seal  one", "seal  two", "seal  three"]
    assert done.exit_code == 0
