"""The claim about checkpoint directories (`--files`): what a weight event promised is what lies there."""

from __future__ import annotations

import errno
import hashlib
from typing import Any

import fsspec

from consumers.audit.claim import Claim
from consumers.audit.facts import Facts
from consumers.audit.rows import Row

MANIFEST = "manifest.json"
CHUNK = 1 << 20
GONE = (errno.ENOENT, errno.ESTALE, None)
"""what a file that is not there says: also one removed by another machine under a reader, and stores without numbers"""


class Files(Claim):
    """A directory of a version that was not collected holds every file of its event with its hash, and its manifest
    hashes to the digest. Collected versions are counted, not missed, also those that go meanwhile; the newest version
    must be there, that of the log as it is now where the walk's was collected since."""

    name = "files"
    sentence = "checkpoint directories hold exactly the bytes that their weight events name"
    unit = "files"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._collected = 0
        self._newest: Row | None = None
        self._found: set[int] = set()

    def weights(self, row: Row) -> None:
        version = row["version"]
        self._newest = row
        filesystem, root = fsspec.core.url_to_fs(row["uri"])
        broken = [
            (message, name)
            for name, wanted in {**row["files"], MANIFEST: row["digest"]}.items()
            if (message := _broken(filesystem, root, row, name, wanted))
        ]
        if not filesystem.exists(root):  # asked last: a live learner may have collected it while its files were read
            self._collected += 1
            return
        self._found.add(version)
        self.finding.checked += len(row["files"]) + 1
        for message, name in broken:
            self.fail(message, row, version=version, file=name)

    def finish(self) -> None:
        while (row := self._newest) and row["version"] not in self._found:
            later = self.facts.latest("weights")
            if later is None or later["version"] <= row["version"]:
                message = f"the newest version {row['version']} has no directory {row['uri']}"
                self.fail(message, row, version=row["version"])
                break
            self.weights(later)
        self.finding.facts |= {"directories": len(self._found), "collected": self._collected}


def _broken(filesystem: Any, root: str, row: Row, name: str, wanted: str) -> str:
    """What is wrong with a file of a version; empty when it is as its event says."""
    try:
        found = _sha256(filesystem, f"{root}/{name}")
    except OSError as error:
        if error.errno not in GONE:
            raise
        return f"version {row['version']} has no {name} under {row['uri']}"
    if found == wanted:
        return ""
    return f"{name} of version {row['version']} hashes to {found[:12]}, its event says {wanted[:12]}"


def _sha256(filesystem: Any, path: str) -> str:
    digest = hashlib.sha256()
    with filesystem.open(path, "rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
