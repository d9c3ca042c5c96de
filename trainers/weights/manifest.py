"""The manifest of a weight directory: which files it has and the sha256 of each. Light: no torch, so that anyone may
verify.

Invariants: the digest of a version is the sha256 of its manifest's bytes, so it covers every file; a manifest holds no
time, host or version number, so equal bytes have equal digests (a version that changed nothing has its parent's
digest); files are named by plain names, so that whoever follows them stays inside the directory.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.trainers.errors import CheckpointError, CorruptCheckpoint
from millrace.trainers.weights.damage import corrupt_if_unreadable

NAME = "manifest.json"
CHUNK = 2**20
LONGEST_NAME = 255
"""bytes that file systems take"""
_DIGEST = re.compile(r"[0-9a-f]{64}")


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


def is_plain(name: object) -> bool:
    """Whether this names a file in any directory and never one outside: no separators, no dots alone, nothing that does
    not print. The manifest itself is no file of its own listing."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..", NAME)
        and not {"/", "\\"}.intersection(name)
        and name.isprintable()
        and len(name.encode("utf-8", "surrogatepass")) <= LONGEST_NAME
    )


def check_names(files: Mapping[str, str], digest: str, *, source: str = "a weight event") -> None:
    """Raises CorruptCheckpoint when the files or the digest of a version, as `source` gives them, are no names that may
    become part of a path."""
    strangers = [name for name in files if not is_plain(name)]
    if strangers:
        raise CorruptCheckpoint(
            f"{source} names {strangers[0][:80]!r}, which is no plain file name; use another version"
        )
    if not _DIGEST.fullmatch(digest):
        raise CorruptCheckpoint(f"{source} names {digest[:80]!r}, which is no sha256; use another version")


def file_hash(path: Path) -> str:
    """sha256 hex of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def load(directory: Path) -> Manifest:
    """The manifest in `directory`; CorruptCheckpoint when there is none or it is not one."""
    with corrupt_if_unreadable(str(directory / NAME)):
        try:
            content = json.loads((directory / NAME).read_bytes())
        except FileNotFoundError as error:
            raise CorruptCheckpoint(f"{directory} has no {NAME}; it is not a finished weight directory") from error
        listing = Manifest({str(name): str(value) for name, value in content["files"].items()})
        check_names(listing.files, listing.digest, source=str(directory / NAME))
        return listing


def verify(directory: Path, digest: str | None = None) -> Manifest:
    """Checks every file against the manifest, and the manifest against `digest` when given; CorruptCheckpoint names the
    first difference."""
    manifest = load(directory)
    if digest is not None and manifest.digest != digest:
        raise CorruptCheckpoint(
            f"{directory} has digest {manifest.digest[:12]}, expected {digest[:12]}; "
            "its manifest was changed, use another version"
        )
    for name, entry in manifest.files.items():
        path = directory / name
        with corrupt_if_unreadable(str(path)):
            actual = file_hash(path) if path.is_file() else None
        if actual is None:
            raise CorruptCheckpoint(f"{path} is missing; restore it or use another version")
        if actual != entry:
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
    hashes = {name: manifest.files[name] for name in sorted(names) if name in manifest.files}
    if not hashes:
        raise CheckpointError(
            f"none of {', '.join(names)} is in the weight directory; save the tokenizer with the model"
        )
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
