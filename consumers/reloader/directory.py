"""Whether a weight directory is the one that its event names, and one that the engine can take.

Invariants: nothing reaches an engine that was not checked here first, because a load that fails may poison it, and
one of another shape makes it serve wrong numbers even after a good load (measured). Only what engines read
is hashed: the training state beside it may be many times larger."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from millrace.infra.errors import ReloadError
from millrace.infra.versions import local
from millrace.schemas.records import WeightVersion
from millrace.trainers.errors import CorruptCheckpoint
from millrace.trainers.weights import manifest, tensorfile

Signature = Mapping[str, tuple[str, tuple[int, ...]]]
"""tensor name -> (dtype, shape)"""


def check(version: WeightVersion, reference: Signature | None) -> tuple[Path, Signature]:
    """The directory of `version` and the signature of its tensors, once everything holds: manifest and served files
    match the event's hashes, and the tensors are those of `reference` (an earlier good version; None: not compared).

    Raises ReloadError that names the first difference."""
    folder = local_folder(version["uri"])
    try:
        manifest.check_names(version["files"], version["digest"])
        listing = manifest.load(folder)
    except CorruptCheckpoint as error:
        raise ReloadError(str(error)) from error
    if listing.digest != version["digest"]:
        raise ReloadError(f"{folder} is not what the event of version {version['version']} names: digest differs")
    files = version["files"]
    tensors = weight_files(folder)
    for name in sorted(files):
        if not is_served(name) and name not in tensors:
            continue
        path = folder / name
        try:
            digest = manifest.file_hash(path)
        except OSError as error:
            raise ReloadError(f"{path} cannot be read ({error.strerror}); another version is needed") from error
        if digest != files[name]:
            raise ReloadError(f"{path} is truncated or changed; restore it or use another version")
    extras = sorted(set(tensors) - files.keys())
    if extras:
        raise ReloadError(f"{folder / extras[0]} is not named by the event, and engines would load it: remove it")
    found_signature = signature(folder, tensors)
    if reference is not None and found_signature != reference:
        names = sorted(
            n for n in found_signature.keys() | reference.keys() if found_signature.get(n) != reference.get(n)
        )
        raise ReloadError(f"{folder} is of another architecture: {', '.join(names[:3])} differ from earlier versions")
    return folder, found_signature


def is_served(name: str) -> bool:
    """Whether engines may read a file of this name."""
    return Path(name).suffix in (".safetensors", ".json", ".jinja", ".txt", ".model")


def local_folder(uri: str) -> Path:
    """The directory behind a path or a file URI. Raises ReloadError for anything that is not mounted here."""
    path = local(uri)
    if path is None:
        raise ReloadError(f"{uri} is not on a file system of this machine: mount the weights where engines run")
    return path


def weight_files(folder: Path) -> list[str]:
    """Names of the files from which an engine loads tensors: those of the index, else every *.safetensors."""
    try:
        return tensorfile.weight_files(folder)
    except CorruptCheckpoint as error:
        raise ReloadError(str(error)) from error


def signature(folder: Path, names: list[str]) -> Signature:
    """Names, dtypes and shapes of all tensors, from the files' headers alone."""
    try:
        return {slot.name: (slot.dtype, slot.shape) for name in names for slot in tensorfile.slots_of(folder / name)}
    except CorruptCheckpoint as error:
        raise ReloadError(str(error)) from error
