"""Deltas on disk, between version directories that the learner writes."""

from __future__ import annotations

import errno
import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from millrace.trainers.errors import CheckpointError, CorruptCheckpoint
from millrace.trainers.weights import checkpoint, delta_files
from millrace.trainers.weights.state import State

CONFIG = {"config.json": b'{"model_type": "qwen2", "dtype": "bfloat16"}'}


def state(step: int) -> State:
    """A bfloat16 model of which each step changes little."""
    torch.manual_seed(0)
    weights = {"a.weight": torch.randn(64, 64), "b.bias": torch.randn(64)}
    weights["a.weight"][:, 3] += step
    return State(weights, CONFIG, step=step)


@pytest.fixture
def versions(tmp_path: Path) -> list[Path]:
    return [checkpoint.write(tmp_path, version, state(version)).path for version in range(4)]


def test_a_chain_gives_the_learners_own_file(versions: list[Path], tmp_path: Path) -> None:
    written = [delta_files.write(old, new) for old, new in pairwise(versions)]
    links = [delta_files.read(each.path, each.digest) for each in written if each is not None]
    assert len(links) == 3
    for at, folder in enumerate(versions[:-1]):
        (tmp_path / f"out-{at}").mkdir()
        delta_files.compose(folder, links[at:], tmp_path / f"out-{at}")
        whole = (versions[-1] / "model.safetensors").read_bytes()
        assert (tmp_path / f"out-{at}" / "model.safetensors").read_bytes() == whole
    first = written[0]
    assert first is not None
    assert first.path == tmp_path / "deltas" / f"{versions[1].name}.delta"
    assert first.size == first.path.stat().st_size < first.full / 5
    assert first.full == (versions[1] / "model.safetensors").stat().st_size
    assert delta_files.write(versions[0], versions[1]) == first, "again, the same"
    assert len(list((tmp_path / "deltas").iterdir())) == 3


def test_what_saves_nothing_is_not_written(versions: list[Path], tmp_path: Path) -> None:
    bits = torch.randint(-(2**15), 2**15, (64, 64), dtype=torch.int16)
    other = State({"a.weight": bits.view(torch.bfloat16).float()}, CONFIG)
    assert delta_files.write(versions[0], checkpoint.write(tmp_path, 9, other).path) is None
    (versions[1] / "more.safetensors").write_bytes((versions[1] / "model.safetensors").read_bytes())
    assert delta_files.write(versions[0], versions[1]) is None
    assert not (tmp_path / "deltas").exists()


def test_a_full_disk_leaves_nothing_behind(
    versions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        CheckpointError, match=r"changes of v1-\w+ cannot be written .* \(No space left on device\): make"
    ):
        delta_files.write(versions[0], versions[1])
    assert list((tmp_path / "deltas").iterdir()) == []


def test_a_delta_that_is_damaged_or_gone_is_refused(versions: list[Path]) -> None:
    written = delta_files.write(versions[0], versions[1])
    assert written is not None
    data = bytearray(written.path.read_bytes())
    data[-1] ^= 1
    written.path.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="truncated or changed"):
        delta_files.read(written.path, written.digest)
    written.path.unlink()
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        delta_files.read(written.path, written.digest)


@pytest.mark.parametrize("point", ["delta.before_rename", "delta.after_rename"])
def test_a_crash_leaves_nothing_or_all(versions: list[Path], tmp_path: Path, point: str) -> None:
    class Killed(BaseException):
        """Stands in for a crash."""

    def fault(name: str) -> None:
        if name == point:
            raise Killed

    with pytest.raises(Killed):
        delta_files.write(versions[0], versions[1], fault=fault)
    assert len(list((tmp_path / "deltas").iterdir())) == (point == "delta.after_rename")
    assert delta_files.write(versions[0], versions[1]) is not None
