"""Whether a weight directory is the one that its event names, and one that the engine can take.

Invariants: nothing reaches an engine that was not checked here first, because a load that fails poisons vLLM, and
one of another shape makes it serve wrong numbers even after a good load (measured on 0.32). Only what engines read
is hashed: the training state beside it may be many times larger."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from infra.errors import ReloadError
from schemas.records import WeightVersion
from trainers import manifest
from trainers.errors import CorruptCheckpoint

INDEX = "model.safetensors.index.json"
Signature = Mapping[str, tuple[str, tuple[int, ...]]]
"""tensor name -> (dtype, shape)"""


def check(version: WeightVersion, reference: Signature | None) -> tuple[Path, Signature]:
    """The directory of `version` and the signature of its tensors, once everything holds: manifest and served files
    match the event's hashes, and the tensors are those of `reference` (an earlier good version; None: not compared).

    Raises ReloadError that names the first difference."""
    folder = local_folder(version["uri"])
    try:
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
            found = manifest.file_hash(path)
        except OSError as error:
            raise ReloadError(f"{path} cannot be read ({error.strerror}); another version is needed") from error
        if found != files[name]:
            raise ReloadError(f"{path} is truncated or changed; restore it or use another version")
    unlisted = sorted(set(tensors) - files.keys())
    if unlisted:
        raise ReloadError(f"{folder / unlisted[0]} is not named by the event, and engines would load it: remove it")
    found_signature = signature(folder, tensors)
    if reference is not None and found_signature != reference:
        odd = sorted(n for n in found_signature.keys() | reference.keys() if found_signature.get(n) != reference.get(n))
        raise ReloadError(f"{folder} is of another architecture: {', '.join(odd[:3])} differ from earlier versions")
    return folder, found_signature


def is_served(name: str) -> bool:
    """Whether engines may read a file of this name."""
    return Path(name).suffix in (".safetensors", ".json", ".jinja", ".txt", ".model")


def local_folder(uri: str) -> Path:
    """The directory behind a path or a file URI. Raises ReloadError for anything that is not mounted here."""
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file"):
        raise ReloadError(f"{uri} is not on a file system of this machine: mount the weights where engines run")
    return Path(unquote(parts.path)) if parts.scheme else Path(uri)


def weight_files(folder: Path) -> list[str]:
    """Names of the files from which an engine loads tensors: those of the index, else every *.safetensors."""
    index = folder / INDEX
    try:
        if index.exists():
            return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReloadError(f"{index} cannot be read ({error}); another version is needed") from error
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if not found:
        raise ReloadError(f"{folder} has no *.safetensors; another version is needed")
    return found


def signature(folder: Path, names: list[str]) -> Signature:
    """Names, dtypes and shapes of all tensors, from the files' headers alone."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in names:
        for tensor, about in _header(folder / name).items():
            if tensor != "__metadata__":
                found[tensor] = (str(about["dtype"]), tuple(int(size) for size in about["shape"]))
    return found


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError("truncated")
            header = json.loads(file.read(length))
            end = max((about["data_offsets"][1] for key, about in header.items() if key != "__metadata__"), default=0)
            if 8 + length + end != path.stat().st_size:
                raise ValueError("truncated")
            return dict(header)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ReloadError(f"{path} is no whole safetensors file ({error}); another version is needed") from error
