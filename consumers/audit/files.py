"""The claim about checkpoint directories (`--files`): what a weight event promised is what lies there."""

from __future__ import annotations

import hashlib
from typing import Any

import fsspec

from consumers.audit.claim import Claim
from consumers.audit.facts import Facts
from consumers.audit.rows import Row

MANIFEST = "manifest.json"
CHUNK = 1 << 20


class Files(Claim):
    """A directory of a version that was not collected holds every file of its event with its hash, and its manifest
    hashes to the digest. Collected versions are counted, not missed; the newest version must be there."""

    name = "files"
    sentence = "checkpoint directories hold exactly the bytes that their weight events name"
    unit = "files"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._collected = 0
        self._newest: tuple[int, Row] | None = None
        self._found: set[int] = set()

    def weights(self, row: Row) -> None:
        version = row["version"]
        self._newest = (version, row)
        filesystem, root = fsspec.core.url_to_fs(row["uri"])
        if not filesystem.exists(root):
            self._collected += 1
            return
        self._found.add(version)
        for name, wanted in row["files"].items():
            self.finding.checked += 1
            path = f"{root}/{name}"
            if not filesystem.exists(path):
                self.fail(f"version {version} has no {name} under {row['uri']}", row, version=version, file=name)
            elif (found := _sha256(filesystem, path)) != wanted:
                message = f"{name} of version {version} hashes to {found[:12]}, its event says {wanted[:12]}"
                self.fail(message, row, version=version, file=name)
        self._manifest(filesystem, root, row)

    def _manifest(self, filesystem: Any, root: str, row: Row) -> None:
        path, version = f"{root}/{MANIFEST}", row["version"]
        self.finding.checked += 1
        if not filesystem.exists(path):
            self.fail(f"version {version} has no {MANIFEST} under {row['uri']}", row, version=version)
        elif (found := _sha256(filesystem, path)) != row["digest"]:
            message = f"the manifest of version {version} hashes to {found[:12]}, its event says {row['digest'][:12]}"
            self.fail(message, row, version=version)

    def finish(self) -> None:
        if self._newest and self._newest[0] not in self._found:
            version, row = self._newest
            self.fail(f"the newest version {version} has no directory {row['uri']}", row, version=version)
        self.finding.facts |= {"directories": len(self._found), "collected": self._collected}


def _sha256(filesystem: Any, path: str) -> str:
    digest = hashlib.sha256()
    with filesystem.open(path, "rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
