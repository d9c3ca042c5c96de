"""What a weight directory must be before an engine sees it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.consumers.reloader.directory import check, local_folder, weight_files
from millrace.infra.errors import ReloadError
from tests.support.announced import damaged, weight_event
from tests.support.tiny_model import write_manifest


@pytest.fixture
def copy(folders: list[Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders[1], tmp_path / "copy"))


def test_a_whole_directory_passes(folders: list[Path]) -> None:
    folder, found = check(weight_event(0, folders[0]), None)
    assert folder == folders[0]
    assert found["lm_head.weight"] == ("F32", (512, 64))
    assert check(weight_event(1, folders[1]), found)[1] == found


def test_training_state_is_not_read(copy: Path) -> None:
    (copy / "state.tensors").write_bytes(b"moments")
    write_manifest(copy)
    event = weight_event(1, copy)
    (copy / "state.tensors").unlink()
    check(event, None)


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _relabel(folder: Path) -> None:
    listing = json.loads((folder / "manifest.json").read_text())
    listing["files"]["config.json"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(listing))


def _stray(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (_truncate, "truncated or changed"),
    "one bit": (_flip, "truncated or changed"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"no \*.safetensors"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "cannot be read"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
    "broken manifest": (lambda folder: (folder / "manifest.json").write_text("{"), "damaged"),
    "other manifest": (_relabel, "digest differs"),
    "stray tensors": (_stray, "engines would load it"),
    "vanished": (shutil.rmtree, "no manifest.json"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(copy: Path, name: str) -> None:
    event = weight_event(1, copy)
    damage, message = DAMAGE[name]
    damage(copy)
    with pytest.raises(ReloadError, match=message):
        check(event, None)


def test_a_damaged_file_with_right_hashes_is_found_by_its_header(copy: Path) -> None:
    event = weight_event(1, copy)
    _truncate(copy)
    with pytest.raises(ReloadError, match="no whole safetensors file"):
        check(damaged(event, copy), None)


def test_another_architecture_is_found(folders: list[Path]) -> None:
    _, reference = check(weight_event(0, folders[0]), None)
    with pytest.raises(ReloadError, match="another architecture"):
        check(weight_event(1, folders[3]), reference)


def test_only_what_the_index_names_is_loaded(copy: Path) -> None:
    _stray(copy)
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert weight_files(copy) == ["model.safetensors"]


def test_uris(tmp_path: Path) -> None:
    assert local_folder("/a/b") == Path("/a/b")
    assert local_folder("file:///a/b%20c") == Path("/a/b c")
    with pytest.raises(ReloadError, match="mount"):
        local_folder("s3://bucket/v1")
