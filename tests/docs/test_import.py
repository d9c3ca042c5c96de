"""docs/import.md, typed from top to bottom over topics in memory: its commands, its table, its reasons."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from millrace.apps.cli.main import app
from millrace.formats.imports import run as importing
from millrace.formats.layouts import OTHER_NAMES, READERS
from millrace.infra.config import load
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas import codec
from millrace.streams.seal.policy_terms import announce
from tests.support.documents import IMPORT, ROOT, RUN_BY, blocks
from tests.support.imported import ROWS, TALK, write

PAGE = ROOT / "docs" / "import.md"
COMMANDS = [command for block in blocks(PAGE) if block.language == "sh" for command in block.commands]
run = CliRunner().invoke


@pytest.fixture(autouse=True)
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryBus:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "chats.jsonl", ROWS["chat"])
    write(tmp_path / "spans.jsonl", ROWS["otlp"])
    columns = [{"messages": [{"role": one["role"], "content": str(one["content"])} for one in TALK]}] * 3
    parquet.write_table(pa.Table.from_pylist([*columns, {"messages": []}]), tmp_path / "rows.parquet")
    made = MemoryBus({})
    made.ensure_topics(load().layout.specs())
    announce(load(), made)
    monkeypatch.setattr(importing, "connect_now", lambda settings: made)
    return made


def raw(bus: MemoryBus) -> list[dict[str, Any]]:
    """What was sent."""
    topic = f"{load().namespace}.raw"
    records = [record for partition in range(bus.partitions(topic)) for record in bus.read(topic, partition)]
    return [dict(codec.decode_as("Event", record.value or b"")) for record in records]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_does_what_it_says(command: str, bus: MemoryBus) -> None:
    assert RUN_BY[command] == IMPORT
    done = run(app, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    events = raw(bus)
    if "--dry-run" in command:
        assert ("would import chats.jsonl (chat): 1 trajectories" in done.output, events) == (True, [])
        return
    assert re.search(r"imported (chats|spans|rows)\.\w+ \((chat|otlp)\): [13] trajectories", done.output)
    assert {event["tenant"] for event in events} == {"acme" if "acme" in command else "local"}
    assert {event["split"] for event in events} == {"evaluation" if "evaluation" in command else "train"}
    assert ("has no rules" in done.stderr) == ("acme" in command)
    if "--refused" in command:
        assert "refused as no_messages: 1" in done.output
        (line,) = [json.loads(line) for line in Path("refused.jsonl").read_text().splitlines()]
        assert (line["file"], line["row"], line["reason"]) == ("rows.parquet", 4, "no_messages")


def test_what_is_refused_is_one_error(bus: MemoryBus) -> None:
    for words, said in (
        (["rows.parquet"], "rows.parquet:4: no_messages"),
        (["chats.jsonl", "--split", "odd"], "no split 'odd'"),
        (["chats.jsonl", "--on-error", "odd"], "stop or skip"),
        (["chats.jsonl", "--layout", "odd"], "no layout 'odd'"),
        (["nowhere.jsonl"], "no file nowhere.jsonl"),
    ):
        done = run(app, ["import", *words])
        assert (done.exit_code, said in done.stderr) == (1, True), done.stderr
    other = run(app, ["--set", "policy.name=other", "import", "chats.jsonl"])
    assert other.exit_code == 1
    assert raw(bus) == []


def test_programs_can_read_what_was_done() -> None:
    (done,) = json.loads(run(app, ["import", "chats.jsonl", "--json"]).output)
    assert (done["layout"], done["trajectories"], done["sent"]) == ("chat", 1, True)
    assert done["name"].startswith("import-")


def test_the_table_and_the_help_have_every_layout() -> None:
    named = set(re.findall(r"^\| `([\w-]+)` \| (?:an? |many)", PAGE.read_text(), re.MULTILINE))
    assert named == set(READERS)
    told = set(re.findall(r"[\w-]+", run(app, ["import", "--help"], env={"COLUMNS": "400"}).output))
    assert set(READERS) | set(OTHER_NAMES) <= told


def test_the_page_names_every_reason() -> None:
    code = "".join(path.read_text() for path in (ROOT / "formats").rglob("*.py"))
    (named,) = re.findall(r"Reasons are (.*?)\.\n", PAGE.read_text(), re.DOTALL)
    assert set(re.findall(r"`(\w+)`", named)) == set(re.findall(r'BadRow\(\s*"(\w+)"', code))
