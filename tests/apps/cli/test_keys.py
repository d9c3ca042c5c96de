"""Keys of clients from the command line, over a log in this process: what the page shows, and what is refused."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millrace.apps.cli import keys
from millrace.apps.cli.main import app
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.principals.book import act_record, outgoing
from millrace.infra.principals.watch import read_book
from millrace.schemas.ids import now_micros
from tests.support.documents import ROOT, blocks

Types = Callable[..., Any]


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryBus:
    monkeypatch.chdir(tmp_path)
    bus = MemoryBus()
    monkeypatch.setattr(bus, "close", lambda: None)
    monkeypatch.setattr(keys, "connect_now", lambda _: bus)
    return bus


@pytest.fixture
def types(bus: MemoryBus) -> Types:
    def run(command: str, code: int = 0) -> Any:
        got = CliRunner().invoke(app, shlex.split(command.removeprefix("millrace ")))
        assert got.exit_code == code, got.output
        return json.loads(got.stdout) if "--json" in command and not code else got.output

    return run


def records(bus: MemoryBus) -> int:
    return bus.ends("dev.principals")[0]


def pepper(folder: Path) -> str:
    return (folder / ".millrace" / "keys" / "pepper").read_text()


def test_what_the_page_shows(bus: MemoryBus, types: Types, tmp_path: Path) -> None:
    assert "support-bot" not in types("millrace key list")
    (shown,) = [block for block in blocks(ROOT / "docs" / "keys.md") if block.language == "sh"]
    create, listing, rotate, revoke = shown.commands
    word = types(create).split()[0]
    assert "support-bot" in types(listing)
    book = read_book(bus, "dev")
    ((grant,),) = (book.grants,)
    assert book.verify(word, pepper(tmp_path), now_micros()) == ("live", grant)
    assert (grant["tenant"], grant["roles"], grant["replaces"]) == ("support", ["agent"], None)
    assert grant["expires"] is not None
    assert 89 < (grant["expires"] - now_micros()) / 86_400e6 <= 90
    assert word.encode() not in b"".join(record.value or b"" for record in bus.read("dev.principals", 0))
    later = types(rotate).split()[0]
    book = read_book(bus, "dev")
    assert book.grants[1] == {**grant, **{name: book.grants[1][name] for name in ("id", "time", "mac", "expires")}} | {
        "replaces": grant["id"]
    }
    assert [book.verify(one, pepper(tmp_path), now_micros()).standing for one in (word, later)] == ["live", "live"]
    before = records(bus)
    assert "revoke" in types(rotate, 1)  # advice
    types(create, 1)
    assert records(bus) == before
    types(revoke)
    book = read_book(bus, "dev")
    assert [book.verify(one, pepper(tmp_path), now_micros()).standing for one in (word, later)] == ["revoked"] * 2
    types(revoke)
    assert records(bus) == before + 2, "a revocation is written once"
    assert "support-bot" not in types("millrace key list")
    assert [row["standing"] for row in types("millrace key list --all --json")] == ["revoked", "revoked"]
    types(create)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("--client bot --role boss", "there is no role boss"),
        ("--client 'a b' --role agent", "--client takes"),
        ("--client bot --role agent --tenant '*'", "send traffic of one tenant"),
        ("--client bot --role agent --expires soon", "no span"),
        ("--client bot --role agent --expires 2020-01-01", "over already"),
        ("--client bot --role agent --budget-hours 99", "short_hours"),
    ],
)
def test_what_makes_no_key(bus: MemoryBus, types: Types, words: str, advice: str) -> None:
    assert advice in types(f"key create {words}", 1)
    assert not read_book(bus, "dev").grants


def test_a_machine_with_another_pepper_makes_no_keys(bus: MemoryBus, types: Types, tmp_path: Path) -> None:
    types("key create --client one --role reader --tenant '*'")
    (tmp_path / ".millrace" / "keys" / "pepper").unlink()
    assert "another pepper" in types("key create --client two --role agent", 1)
    assert not (tmp_path / ".millrace" / "keys" / "pepper").exists()
    assert "another pepper" in types("key list")
    types("key revoke one")
    types("key create --client two --role agent")


def test_a_key_that_was_written_and_never_shown_is_listed_and_revoked(
    bus: MemoryBus, types: Types, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of a command that is killed before, and after, the log has its record."""
    write, done = keys._write, []

    def dies(*words: Any) -> None:
        if done:
            write(*words)
        raise KeyboardInterrupt

    monkeypatch.setattr(keys, "_write", dies)
    for wrote in (False, True):
        done[:] = [wrote] * wrote
        CliRunner().invoke(app, ["key", "create", "--client", "bot", "--role", "agent"])
        assert len(read_book(bus, "dev").grants) == wrote
    monkeypatch.setattr(keys, "_write", write)
    (row,) = types("key list --json")
    assert (row["client"], row["standing"], row["last_used"]) == ("bot", "live", None)
    assert types(f"key revoke {row['id']} --json") == {"revoked": [row["id"]]}


def test_last_use_and_who_did_what_are_listed(bus: MemoryBus, types: Types) -> None:
    made = types("key create --client bot --role annotator --reward-source user --json")
    with bus.publisher() as publisher:
        publisher.publish(outgoing("dev.principals", act_record("use", made["id"], 1_000_000, "gateway"))).result(5)
    types(f"key revoke {made['id']} --reason leaked")
    (row,) = types("key list --all --json")
    assert (row["last_used"], row["reason"], row["reward_sources"]) == ("1970-01-01T00:00:01+00:00", "leaked", ["user"])
    assert row["author"] == row["revoked_by"] != ""
