"""The documents tell the truth: every command in them exists with its flags, every link leads somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infra.cli.main import app
from infra.cli.template import render

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {page: page.read_text() for page in PAGES}


def commands() -> list[str]:
    """Every line of every `sh` block."""
    blocks = [block for text in TEXT.values() for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)]
    return sorted({line.strip() for block in blocks for line in block.splitlines() if line.strip()})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT[page]):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_page_of_settings_is_what_init_writes() -> None:
    assert render("dev", "policy") in TEXT[ROOT / "docs" / "configuration.md"], "write the output of render() into it"


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("make ")])
def test_every_make_target_exists(line: str) -> None:
    target = shlex.split(line)[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("millrace ")])
def test_every_command_of_the_documents_parses(line: str) -> None:
    words = shlex.split(line)[1:]
    names = [word for word in words if not word.startswith("-") and word.islower() and "/" not in word]
    path = names[:2] if names[0] == "policy" else names[:1]
    result = CliRunner().invoke(app, [*path, "--help"])
    assert result.exit_code == 0, result.output
    for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
        assert flag in result.output, f"{line}: no flag {flag}"


@pytest.mark.parametrize("line", [line for line in commands() if "python -m " in line])
def test_every_module_of_the_documents_exists(line: str) -> None:
    module = line.split("python -m ")[1].split()[0]
    assert (ROOT / (module.replace(".", "/") + ".py")).exists() or (ROOT / module.replace(".", "/")).is_dir()
