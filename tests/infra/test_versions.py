"""Where a version's directory lies after its deployment was moved, and how it is removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.infra import faults
from millrace.infra.versions import PIN, directory, locate, remove

NAME = "v3-0123456789ab"


def event(uri: str, delta: str | None = None) -> Any:
    return {"policy": "p", "version": 3, "uri": uri, "delta": delta}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where a deployment was moved to."""
    (tmp_path / "new" / NAME).mkdir(parents=True)
    (tmp_path / "new" / "deltas").mkdir()
    (tmp_path / "new" / "deltas" / f"{NAME}.delta").touch()
    return tmp_path / "new"


def test_the_recorded_place_comes_first(root: Path, tmp_path: Path) -> None:
    old = tmp_path / "old" / NAME
    old.mkdir(parents=True)
    assert locate(event(str(old)), root)["uri"] == str(old)
    assert directory(event(f"file://{old}"), f"file://{root}") == old


def test_what_is_not_there_is_found_by_its_name(root: Path) -> None:
    moved = locate(event(f"/old/{NAME}", f"/old/deltas/{NAME}.delta"), root)
    assert moved["uri"] == str(root / NAME)
    assert moved["delta"] == str(root / "deltas" / f"{NAME}.delta")
    assert directory(event(f"file:///old/{NAME}"), f"file://{root}") == root / NAME


@pytest.mark.parametrize("uri", ["/old/v4-0123456789ab", "/old/..", "/old/deltas", "/old/", "s3://old/v3-0123456789ab"])
def test_what_lies_nowhere_keeps_its_recorded_place(root: Path, uri: str) -> None:
    """A name that no learner gives leads nowhere."""
    assert locate(event(uri, "/old/deltas/x.delta"), root) == event(uri, "/old/deltas/x.delta")


@pytest.mark.parametrize("point", ["versions.in_removal", "versions.after_removal"])
def test_a_removal_that_is_killed_leaves_no_part_of_a_version_under_its_name(
    root: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    def kill(name: str) -> None:
        if name == point:
            raise KeyboardInterrupt

    (root / NAME / "weights").touch()
    monkeypatch.setattr(faults, "point", kill)
    with pytest.raises(KeyboardInterrupt):
        remove(root / NAME)
    drafts = [path for path in root.iterdir() if path.name != "deltas"]
    assert len(drafts) == (point == "versions.in_removal"), "all of it, under the name of a draft"
    assert all(path.name.startswith(".tmp-v3-") and (path / "weights").exists() for path in drafts)
    monkeypatch.undo()
    assert all(remove(path) for path in drafts)
    assert [path.name for path in root.iterdir()] == ["deltas"]


def test_a_pinned_version_is_never_without_its_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / NAME / PIN).touch()
    monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("a process that dies here leaves a draft"))
    assert not remove(root / NAME)
    assert (root / NAME / PIN).exists()


def test_a_version_that_is_pinned_during_its_removal_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def pin_late(path: Path, target: Path) -> Path:
        (path / PIN).touch()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", pin_late)
    assert not remove(root / NAME)
    assert (root / NAME / PIN).exists()


def test_a_version_that_cannot_be_renamed_stays_whole(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "the folder is closed")

    (root / NAME / "weights").touch()
    monkeypatch.setattr(Path, "rename", refuse)
    assert not remove(root / NAME)
    assert (root / NAME / "weights").exists()
