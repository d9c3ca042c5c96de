"""Deltas on disk: one file a version under `deltas/`, beside the version directories.

    weights/<policy>/
        v{n}-{digest12}/             the whole version, as ever
        deltas/v{n}-{digest12}.delta what changed since its parent

Invariants: a delta appears under its name by one rename, after its bytes are durable; it is no part of the version
(manifest and digest are the same with and without it), so it may be lost, and made again, at any time; what is composed
is the learner's own file, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.infra import durable
from millrace.trainers.errors import CheckpointError, CorruptCheckpoint
from millrace.trainers.weights import delta
from millrace.trainers.weights.delta import Delta
from millrace.trainers.weights.tensorfile import open_file, open_folder, weight_files

FOLDER = "deltas"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class WrittenDelta:
    """A durable delta. digest: sha256 hex of the file; size: its bytes; full: bytes of the version's weight files."""

    path: Path
    digest: str
    size: int
    full: int


def full_size(folder: Path) -> int:
    """Bytes of the weight files of a version directory."""
    return sum((folder / name).stat().st_size for name in weight_files(folder))


def write(parent: Path, folder: Path, *, fault: Callable[[str], None] = lambda _: None) -> WrittenDelta | None:
    """The delta from the version directory `parent` to `folder`, durable. None when it would be no smaller than the
    version itself, or when `folder` holds its weights in several files: then only the whole version is worth sending.

    `fault` is called with the name of each point at which a crash must be harmless. Raises CorruptCheckpoint when one
    of the directories cannot be read, CheckpointError when the disk is full or gone."""
    if weight_files(folder) != [WEIGHTS]:
        return None
    data, version_size = delta.encode(open_folder(parent), open_file(folder / WEIGHTS)), full_size(folder)
    if len(data) >= version_size:
        return None
    directory = folder.parent / FOLDER
    target = directory / f"{folder.name}.delta"

    def on_step(step: durable.Step) -> None:
        match step:
            case "flushed":
                fault("delta.before_rename")
            case "named":
                fault("delta.after_rename")

    try:
        durable.make_folder(directory)
        durable.write(target, data, mode=durable.SHARED_MODE, on_step=on_step)
    except OSError as error:
        raise CheckpointError(
            f"the changes of {folder.name} cannot be written to {directory} ({error.strerror or error}): make room "
            "there, or mend it, and start again; no version was lost"
        ) from error
    return WrittenDelta(target, hashlib.sha256(data).hexdigest(), len(data), version_size)


def read(path: Path, digest: str) -> Delta:
    """The delta in `path`. Raises CorruptCheckpoint when it is missing, or not the one of that sha256."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorruptCheckpoint(f"{path} cannot be read ({error.strerror}); read the whole version instead") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise CorruptCheckpoint(f"{path} is truncated or changed; read the whole version instead")
    return delta.decode(data)


def compose(base: Path, deltas: Sequence[Delta], folder: Path) -> None:
    """Write into `folder` the weight file of the version that `deltas` lead to from the directory `base`. Not durable:
    whoever reads it checks it. Raises CorruptCheckpoint when the deltas do not fit the base."""
    with (folder / WEIGHTS).open("wb") as file:
        file.write(deltas[-1].header)
        for _, data in delta.compose(open_folder(base), deltas):
            file.write(data.data)
