"""Logs are read line by line, each once, also where one is begun anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millrace.apps.cli import logs
from millrace.apps.cli.logs import LogLine, Tails


def test_the_newest_lines_come_first_and_then_what_is_new(tmp_path: Path) -> None:
    log = tmp_path / "seal.log"
    log.write_text("one\ntwo\nthr")
    found = Tails(tmp_path)
    assert list(found.last(1)) == [LogLine("seal", "two")], "a line is given when it is whole"
    assert list(found.next_lines()) == []
    with log.open("a") as file:
        file.write("ee\n\nfour\n")
    (tmp_path / "refine.log").write_text("new\n")
    assert list(found.next_lines()) == [
        LogLine("refine", "new"),
        LogLine("seal", "three"),
        LogLine("seal", ""),
        LogLine("seal", "four"),
    ]
    assert list(found.next_lines()) == []


def test_a_log_that_is_begun_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "seal.log"
    log.write_text("one\n")
    found = Tails(tmp_path)
    list(found.last(5))
    fresh = tmp_path / "fresh"
    fresh.write_text("two\nthree\n")
    os.replace(log, tmp_path / "seal.log.1")
    os.replace(fresh, log)
    assert [line.text for line in found.next_lines()] == ["two", "three"]
    log.write_text("4\n")
    assert [line.text for line in found.next_lines()] == ["4"]


def test_of_a_long_log_only_whole_lines_of_its_end_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "TAIL_BYTES", 12)
    (tmp_path / "seal.log").write_bytes(b"first line\nsecond\nx\xffy\n")
    assert [line.text for line in Tails(tmp_path).last(9)] == ["second", "x\ufffdy"]


def test_processes_are_named_or_their_role_is(tmp_path: Path) -> None:
    for name in ("learn-0", "learn-1", "seal", "rollout-10"):
        (tmp_path / f"{name}.log").touch()
    assert Tails(tmp_path, ["learn"]).processes() == ["learn-0", "learn-1"]
    assert Tails(tmp_path, ["learn-1", "seal"]).processes() == ["learn-1", "seal"]
    assert Tails(tmp_path, ["nobody"]).processes() == []
    assert Tails(tmp_path / "none").processes() == []
