"""`millrace registry`: what is added is sealed, counted and forgotten again, and never shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from millrace.apps.cli.main import app
from millrace.streams.refine.subjects import store


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("millrace.toml").write_text('[governance.tenants.acme]\nidentifiers = "acme.registry"\n')


def run(*words: str, text: str = "") -> str:
    result = CliRunner().invoke(app, ["registry", *words], input=text)
    assert result.exit_code == 0, result.output
    return result.output


def test_subjects_are_added_counted_and_removed():
    home = Path(".millrace").absolute()
    assert "2 subjects" in run("add", "acme", text='s-1,Ana Example,"Example, Ana"\n\ns-2,bo@example.org\n')
    Path("more.csv").write_text("s-1,Ana Example,+49 30 901820\n")
    run("add", "acme", "more.csv")
    assert run("list", "acme") == "s-1 3\ns-2 1\n"
    assert b"Ana" not in (home / "acme.registry").read_bytes()
    assert store.read(home / "acme.registry", store.key_in(home))["s-1"] == [
        "Ana Example",
        "Example, Ana",
        "+49 30 901820",
    ]
    assert "1 subjects" in run("remove", "acme", "s-1")
    assert run("list", "acme") == "s-2 1\n"


def test_a_tenant_without_a_registry_is_told_what_to_set():
    result = CliRunner().invoke(app, ["registry", "list", "other"])
    assert (result.exit_code, "set identifiers" in result.stderr) == (1, True)
