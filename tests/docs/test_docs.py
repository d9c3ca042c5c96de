"""The documents tell the truth: every command has a test that runs it, every setting exists, every link works.

Commands that need services run in `test_deployment.py`, benchmarks in `test_benchmarks.py`; `RUN_BY` says which."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from millrace.apps.cli.template import render
from millrace.infra.config import Settings, load
from millrace.producers.tasks.source import open_tasks
from millrace.schemas.codec import BODIES
from millrace.schemas.registry import current
from millrace.trainers.backends.layout import ROLES
from tests.support.documents import CI, HERE, PAGES, ROOT, RUN_BY, Block, all_blocks, reading, spoken
from tests.support.house import ROOMS

TEXT = {page: page.read_text() for page in PAGES}
LANGUAGES = {"sh", "python", "toml", "json", "text"}
SHOWN = [command for block in all_blocks("sh") for command in block.commands]


def recipe(target: str) -> list[str]:
    """What make would run for a target, once everything is installed. A make that runs these tests has no say in it."""
    command = ["make", "-n", "-o", ".venv/.millrace-setup", target]
    alone = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=alone)
    return done.stdout.splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT[page]):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_index_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\(([^)#]+)", TEXT[ROOT / "docs" / "README.md"]))
    assert {page.name for page in PAGES if page.parent.name == "docs" and page.name != "README.md"} <= linked


def test_the_page_of_settings_is_what_init_writes() -> None:
    assert render("dev", "policy") in TEXT[ROOT / "docs" / "configuration.md"], "write the output of render() into it"


def test_the_page_of_events_has_every_field() -> None:
    rows = dict(re.findall(r"^\| .*?`(\w+)`\)? \| (.*) \|$", TEXT[ROOT / "docs" / "events.md"], re.MULTILINE))
    inside = {"EpisodeStarted": "Versions", "InternalState": "Injected"}
    for name in {*BODIES.values(), "Event", "Governance"}:
        fields = [
            field["name"] for part in (name, inside.get(name, name)) for field in current(part).definition["fields"]
        ]
        assert set(re.findall(r"`(\w+)`", rows[name])) == set(fields), name


def test_the_table_of_metrics_has_every_metric() -> None:
    told: set[str] = set()
    for names in re.findall(r"^\| (`millrace\..*?) \|", TEXT[ROOT / "docs" / "operations.md"], re.MULTILINE):
        first, *rest = re.findall(r"`([\w.]+)`", names)
        told |= {first, *(first.rpartition(".")[0] + name for name in rest)}
    code = "".join(path.read_text() for package in ROOMS for path in (ROOT / package).rglob("*.py"))
    assert told == set(re.findall(r'telemetry\.(?:counter|gauge|histogram)\(\s*"(.*?)"', code))


def test_every_block_says_what_it_is_and_is_read_once() -> None:
    read = list(reading())
    assert {block.language for block in read} <= LANGUAGES, "a block in another language is run by no test"
    assert len({block.where for block in read}) == len(read)
    indented = [
        page.name for page in PAGES if re.search(r"^ {4}\w", re.sub(r"```.*?```", "", TEXT[page], flags=re.S), re.M)
    ]
    assert not indented, "use fences: indented code is run by no test"


def test_every_command_is_run_by_a_test() -> None:
    shown = {*SHOWN, *spoken()}
    assert shown - set(RUN_BY) == set(), "let a test run it, and say which in RUN_BY"
    assert set(RUN_BY) - shown == set(), "no document shows it any more"
    for runner in RUN_BY.values():
        assert (ROOT / runner).is_file()


def test_ci_runs_what_it_is_said_to_run() -> None:
    steps = (ROOT / CI).read_text().splitlines()
    assert {command for command, runner in RUN_BY.items() if runner == CI} == {"make setup", "make demo", "make test"}
    assert {"part make setup", "part make test", "part make demo-short"} <= set(steps)
    assert "pytest" in recipe("test")[-1]
    assert recipe("demo-short") == [f"{recipe('demo')[-1]} --short"]
    assert re.search(r"^check: setup\b", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.search(r"^test: check\b", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_make_runs_what_the_tests_run_smaller() -> None:
    assert RUN_BY["make histories"] in recipe("histories")[-1]
    assert recipe("chaos")[-1].endswith("-m tests.chaos")
    assert "ls bench_*.py" in recipe("bench")[-1]


def test_activating_the_environment_finds_the_command() -> None:
    (line,) = [command for command, runner in RUN_BY.items() if runner == HERE]
    done = subprocess.run(
        ["bash", "-c", f"{line} && command -v millrace"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert Path(done.stdout.strip()).samefile(ROOT / ".venv" / "bin" / "millrace")


@pytest.mark.parametrize("block", all_blocks("toml"), ids=lambda block: block.where)
def test_every_piece_of_settings_loads(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "millrace.toml"
    file.write_text(block.text)
    assert set(tomllib.loads(block.text)) <= load(file).model_fields_set


def test_the_python_of_backends_makes_what_the_page_says() -> None:
    (block,) = [block for block in all_blocks("python") if block.page == "backends.md"]
    names: dict[str, Any] = {}
    exec(block.text, names)
    backend = names["backend"]
    assert [role for role in ROLES if backend.apart(role)] == ["critic", "reference"]


def test_every_setting_that_is_named_exists() -> None:
    named = {found for text in TEXT.values() for found in re.findall(r"`\[(\w+)\] (\w+)", text)}
    assert len(named) > 10
    for section, key in sorted(named):
        model = Settings.model_fields[section].annotation
        assert key in getattr(model, "model_fields", {}), f"[{section}] {key}"


@pytest.mark.parametrize("block", all_blocks("json"), ids=lambda block: block.where)
def test_every_task_can_be_loaded(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(block.text)
    assert len(open_tasks(file)) == len(block.text.splitlines())
