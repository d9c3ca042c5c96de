"""A small file is whole or not there, whatever happens while it is written."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from millrace.infra import durable


def test_a_write_puts_the_bytes_under_the_name_and_leaves_nothing_else(tmp_path: Path) -> None:
    for data in (b"one", "zwei ä", b""):
        durable.write(tmp_path / "file", data)
        assert (tmp_path / "file").read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == durable.PRIVATE


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_write_that_fails_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    durable.write(tmp_path / "file", b"old")

    def fails(*_: object) -> None:
        raise OSError(28, "no room")

    monkeypatch.setattr(os if step == "fsync" else Path, step, fails)
    with pytest.raises(OSError, match="no room"):
        durable.write(tmp_path / "file", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(handle: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def renamed(path: Path, target: Path) -> Path:
        steps.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    durable.write(tmp_path / "file", b"x")
    assert steps == ["file", "rename", "folder"]
    steps.clear()
    durable.write(tmp_path / "file", b"y", sync=False)
    assert steps == ["rename"]


def test_what_is_made_once_is_the_same_for_all_who_ask(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda number: durable.once(tmp_path / "key", f"{number}".encode()), range(64)))
    assert len(found) == 1
    assert durable.once(tmp_path / "key", b"later") in found
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == durable.PRIVATE


def test_an_empty_file_that_a_power_cut_left_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "key").touch()
    assert durable.once(tmp_path / "key", b"whole") == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_what_is_made_once_is_on_the_disk_before_anybody_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync = os.fsync

    def synced(handle: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    durable.once(tmp_path / "key", b"x")
    assert steps == ["file", "folder"]
    steps.clear()
    durable.once(tmp_path / "key", b"y")
    assert steps == ["folder"], "the first may not have come so far"


def test_a_tree_is_flushed_with_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tree"
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "file").write_bytes(b"x")
    flushed: set[Path] = set()
    monkeypatch.setattr(durable, "flush", flushed.add)
    durable.flush_tree(folder)
    assert flushed == {tmp_path, folder, folder / "below", folder / "below" / "file"}
