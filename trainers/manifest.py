"""The manifest of a weight directory: which files it has and the sha256 of each. Light: no torch, so that anyone may
verify.

Invariants: the digest of a version is the sha256 of its manifest's bytes, so it covers every file; a manifest holds no
time, host or version number, so equal bytes have equal digests (a version that changed nothing has its parent's
digest).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainers.errors import CheckpointError, CorruptCheckpoint

NAME = "manifest.json"
CHUNK = 2**20


@dataclass(frozen=True, slots=True)
class Manifest:
    """files: name -> sha256 hex, sorted by name."""

    files: Mapping[str, str]

    def to_bytes(self) -> bytes:
        """What is written, and what the digest is taken of."""
        return (json.dumps({"format": 1, "files": dict(sorted(self.files.items()))}, indent=1) + "\n").encode()

    @property
    def digest(self) -> str:
        """sha256 hex."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


def file_hash(path: Path) -> str:
    """sha256 hex of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def load(directory: Path) -> Manifest:
    """The manifest in `directory`; CorruptCheckpoint when there is none or it is not one."""
    try:
        content = json.loads((directory / NAME).read_bytes())
        files = {str(name): str(value) for name, value in content["files"].items()}
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{directory} has no {NAME}; it is not a finished weight directory") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(
            f"{directory / NAME} is damaged ({error}); restore it or use another version"
        ) from error
    return Manifest(files)


def verify(directory: Path, digest: str | None = None) -> Manifest:
    """Checks every file against the manifest, and the manifest against `digest` when given; CorruptCheckpoint names the
    first difference."""
    manifest = load(directory)
    if digest is not None and manifest.digest != digest:
        raise CorruptCheckpoint(
            f"{directory} has digest {manifest.digest[:12]}, expected {digest[:12]}; "
            "its manifest was changed, use another version"
        )
    for name, expected in manifest.files.items():
        path = directory / name
        if path.parent != directory:
            raise CorruptCheckpoint(f"{directory / NAME} names {name!r}, outside its directory; do not use it")
        if not path.is_file():
            raise CorruptCheckpoint(f"{path} is missing; restore it or use another version")
        if file_hash(path) != expected:
            raise CorruptCheckpoint(f"{path} is truncated or changed; restore it or use another version")
    return manifest


def base_digest(directory: Path) -> str:
    """sha256 hex over the configuration and the weight files of a model directory, which may have no manifest. Raises
    CorruptCheckpoint when they cannot be read."""
    names = ["config.json", *sorted(path.name for path in directory.glob("*.safetensors"))]
    try:
        return hashlib.sha256(json.dumps({name: file_hash(directory / name) for name in names}).encode()).hexdigest()
    except OSError as error:
        raise CorruptCheckpoint(f"{directory}, the base of an adapter, cannot be read ({error}); restore it") from error


def subset_hash(manifest: Manifest, names: tuple[str, ...]) -> str:
    """sha256 hex over the names and hashes of those of `names` that the manifest has (tokenizer, template)."""
    chosen = {name: manifest.files[name] for name in sorted(names) if name in manifest.files}
    if not chosen:
        raise CheckpointError(
            f"none of {', '.join(names)} is in the weight directory; save the tokenizer with the model"
        )
    return hashlib.sha256(json.dumps(chosen).encode()).hexdigest()
