"""What is written is whole or not there, whatever happens meanwhile."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra import durable


def test_a_write_puts_the_bytes_under_the_name_and_leaves_nothing_else(tmp_path: Path) -> None:
    for data in (b"one", "zwei ä", b""):
        durable.write(tmp_path / "file", data)
        assert (tmp_path / "file").read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == durable.PRIVATE_MODE


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
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == durable.PRIVATE_MODE


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


def written(path: Path) -> None:
    durable.write(path, b"new" * 1000)


def made_once(path: Path) -> None:
    durable.once(path, b"new" * 1000)


def replaced(path: Path) -> None:
    with durable.drafting(path, replace=True) as draft:
        draft.write_bytes(b"new" * 1000)


def named(path: Path) -> None:
    draft = durable.draft_of(path)
    (draft / "below").mkdir(parents=True)
    for each in (draft / "one", draft / "below" / "two"):
        each.write_bytes(b"new" * 1000)
    durable.name(draft, path, backup=durable.draft_of(path))


def seen(path: Path) -> dict[str, bytes] | bytes | None:
    """What a reader finds under a name: a file, or the files of a folder."""
    if path.is_dir():
        return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}
    return path.read_bytes() if path.exists() else None


def killed_at(wanted: int, act: Callable[[Path], None], path: Path) -> bool:
    """Whether a process that does so, killed before the line of the module with that number, came so far."""
    child = os.fork()
    if not child:
        left = wanted

        def line(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename != durable.__file__:
                return None
            left -= event == "line"
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            return line

        sys.settrace(line)
        act(path)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status != 0


@pytest.mark.parametrize("act", [written, made_once, replaced, named])
@pytest.mark.parametrize("old", [False, True])
def test_killed_before_any_line_it_leaves_old_or_new_and_drafts_that_are_known(
    act: Callable[[Path], None], old: bool, tmp_path: Path
) -> None:
    before: dict[str, bytes] | bytes | None = None
    if old and act is named:
        before = {"old": b"old"}
    elif old and act is not made_once:
        before = b"old"
    found, deaths = [], 0
    for deaths in range(1, 500):
        home = tmp_path / str(deaths)
        home.mkdir()
        path = home / "a-name"
        if isinstance(before, dict):
            path.mkdir()
            (path / "old").write_bytes(b"old")
        elif before is not None:
            path.write_bytes(before)
        elif old:
            path.touch()  # as a power cut leaves it: `once` takes it for nothing
            before = b""
        died = killed_at(deaths, act, path)
        found.append(seen(path))
        others = [each.name for each in home.iterdir() if each != path]
        assert {durable.final_name(name) for name in others} <= {"a-name"}
        act(path)
        assert seen(path) == found[-1] or found[-1] == before or found[-1] is None
        if not died:
            break
    whole = seen(path)
    states = [state for at, state in enumerate(found) if not at or found[at - 1] != state]
    gap = [None] if isinstance(before, dict) else []
    assert states == [before, *gap, whole], "old, then new; a folder cannot be exchanged, so between them it is aside"
    assert deaths > 10


@pytest.mark.parametrize("old", [False, True])
def test_a_folder_has_its_name_after_all_in_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    steps: list[Path | str] = []
    flush = durable.flush

    def flushed(path: Path) -> None:
        steps.append(path)
        flush(path)

    draft, path, aside = tmp_path / "draft", tmp_path / "name", tmp_path / "aside"
    (draft / "below").mkdir(parents=True)
    (draft / "below" / "file").write_bytes(b"x")
    if old:
        path.mkdir()
        (path / "old").touch()
    monkeypatch.setattr(durable, "flush", flushed)
    durable.name(draft, path, backup=aside, on_step=steps.append)
    assert set(steps[:3]) == {draft, draft / "below", draft / "below" / "file"}
    assert steps[3:] == ["flushed", "named", tmp_path]
    assert seen(path) == {"below/file": b"x"}
    assert aside.exists() == old
    assert not draft.exists()


def test_a_folder_that_holds_something_is_not_replaced(tmp_path: Path) -> None:
    for name in ("draft", "name"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(OSError, match="not empty"):
        durable.name(tmp_path / "draft", tmp_path / "name")
    assert {(tmp_path / name / "file").read_text() for name in ("draft", "name")} == {"draft", "name"}


def test_each_step_is_heard_of(tmp_path: Path) -> None:
    steps: list[str] = []
    durable.write(tmp_path / "file", b"x", mode=durable.SHARED_MODE, on_step=steps.append)
    assert steps == ["filled", "flushed", "named"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == durable.SHARED_MODE & ~mask


def test_what_is_there_is_replaced_only_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError, match="is there already"), durable.drafting(path) as draft:
        draft.write_bytes(b"new")
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"file": b"old"}
    with durable.drafting(path, replace=True) as draft:
        draft.write_bytes(b"new")
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"file": b"new"}


def test_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    """`--out /dev/null` of root would make it a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileExistsError, match="device or a pipe"):
        durable.write(pipe, b"x")
    with pytest.raises(FileExistsError, match="device or a pipe"), durable.drafting(pipe, replace=True) as draft:
        draft.write_bytes(b"x")
    assert [each for each in tmp_path.iterdir() if stat.S_ISFIFO(each.stat().st_mode)] == [*tmp_path.iterdir()]


names = st.text(st.characters(blacklist_characters="/", blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=50)


@given(names.filter(lambda name: name not in (".", "..")))
def test_a_draft_is_known_and_says_what_it_was_to_be(name: str) -> None:
    draft = durable.draft_of(Path("/folder") / name)
    assert draft.parent == Path("/folder")
    assert durable.final_name(draft.name) == name
    assert durable.draft_of(Path("/folder") / name) != draft


@given(names.filter(lambda name: not name.startswith(durable.DRAFT)))
def test_what_is_no_draft_was_to_be_nothing(name: str) -> None:
    assert durable.final_name(name) == ""
    assert durable.final_name(f"{durable.DRAFT}{name}"[: len(durable.DRAFT) + 12]) == ""


def test_a_new_folder_is_on_the_disk_with_those_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(durable, "flush", flushed.append)
    folder = tmp_path / "a" / "b" / "c"
    durable.make_folder(folder, 0o700)
    assert set(flushed) == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    flushed.clear()
    durable.make_folder(folder)
    assert flushed == [folder.parent], "whoever made it may not have come so far"
