"""Private directories: whatever lies in one goes, nothing outside does, and what a killed process left is swept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.streams.reward import run_folders

DEPTH = 3000


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "place"
    made.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(made))
    return made


def deep(path: Path) -> None:
    """Directories in one another, more than a recursion or a path can follow."""
    at = os.open(path, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("d", dir_fd=at)
        inner = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(at)


def test_directories_deeper_than_any_recursion_are_removed(place: Path) -> None:
    with run_folders.directory() as path:
        deep(path)
    assert list(place.iterdir()) == []


def test_no_link_is_followed_and_no_closed_directory_stays(place: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "kept").write_text("x")
    with run_folders.directory() as path:
        (path / "link").symlink_to(other)
        (path / "a" / "b" / "c").mkdir(parents=True)
        (path / "a" / "link").symlink_to(other)
        (path / "a" / "b" / "file").write_text("x")
        os.mkfifo(path / "a" / "fifo")
        for closed in (path / "a" / "b", path / "a", path):
            closed.chmod(0)
    assert list(place.iterdir()) == []
    assert (other / "kept").read_text() == "x"


TREES = st.recursive(st.none(), lambda inner: st.dictionaries(st.sampled_from("abc01"), inner, max_size=3))


@given(TREES)
def test_every_tree_is_removed(tree: dict | None) -> None:
    def build(at: Path, node: dict | None) -> None:
        for name, inner in (node or {}).items():
            if inner is None:
                (at / name).write_text("x")
            else:
                (at / name).mkdir()
                build(at / name, inner)

    with run_folders.directory() as path:
        build(path, tree)
    assert not path.exists()


def test_only_what_nobody_holds_is_swept(place: Path) -> None:
    left = place / f"{run_folders.PREFIX}left"
    (left / "work").mkdir(parents=True)
    (place / "other").mkdir()
    with run_folders.directory() as held:
        assert run_folders.sweep() == 1
        assert sorted(place.iterdir()) == sorted([held, place / "other"])
