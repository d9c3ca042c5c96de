"""The law about checkpoint directories (`--files`): what a weight event promised is what lies there.

Invariants: no code of those who write versions is used; what a live learner collects meanwhile is not missed; figures
that are read from files are compared where the files are those of the event, so that one cause is one violation."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import fsspec

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law
from millrace.consumers.audit.rows import Row
from millrace.infra.versions import located
from millrace.schemas.records import WeightVersion
from millrace.trainers.weights.manifest import is_plain

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = ".safetensors"
"""how the names of files end that an engine loads where there is no index"""
TEMPLATE, TOKENIZER = "chat_template.jinja", "tokenizer_config.json"
CHUNK = 1 << 20
GONE = (errno.ENOENT, errno.ESTALE, None)
"""what a file that is not there says: also one removed by another machine under a reader, and stores without numbers"""


class Files(Law):
    """A directory of a version that was not collected holds every file of its event with its hash, and its manifest
    hashes to the digest; its weight files are as large as the event says, no other one is beside them, and the chat
    template of version 0 is the policy's. A delta that is there is the event's. Collected versions are counted, not
    missed, also those that go meanwhile; the newest version must be there, that of the log as it is now where the
    walk's was collected since. Directories whose recorded path is not there are looked for where the policy's versions
    lie now."""

    name = "files"
    sentence = "checkpoint directories hold exactly the bytes that their weight events name"
    unit = "files"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._collected = 0
        self._newest: Row | None = None
        self._found: set[int] = set()

    def weights(self, row: Row[WeightVersion]) -> None:
        if self.facts.root:
            row = Row(row.raw, row.name, located(row.record, self.facts.root), row.value, row.kind)
        version = row["version"]
        self._newest = row
        filesystem, root = fsspec.core.url_to_fs(row["uri"])
        odd = [name for name in row["files"] if not is_plain(name)]
        for name in odd:
            self.fail("the event names a file outside its directory", row, version=version, file=name)
        broken = [
            (message, name)
            for name, wanted in {**row["files"], MANIFEST: row["digest"]}.items()
            if name not in odd and (message := _broken(filesystem, root, row, name, wanted))
        ]
        broken += [(message, "") for message in (() if broken or odd else _figures(filesystem, root, row))]
        if row["delta"] is not None and (message := _delta(row)):
            broken.append((message, ""))
        if not filesystem.exists(root):  # asked last: a live learner may have collected it while its files were read
            self._collected += 1
            return
        self._found.add(version)
        self.finding.checked += len(row["files"]) + 1
        for message, name in broken:
            self.fail(message, row, version=version, **({"file": name} if name else {}))

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


def _figures(filesystem: Any, root: str, row: Row[WeightVersion]) -> Iterator[str]:
    """What an event says of its files' content and the files do not, given that they are those of the event. A
    directory that goes meanwhile says nothing."""
    version = row["version"]
    try:
        there = {str(path).rstrip("/").rpartition("/")[2] for path in filesystem.ls(root, detail=False)}
        more = sorted(name for name in there - {*row["files"]} if name.endswith(WEIGHTS))
        if more:
            yield f"version {version} has {', '.join(more)} beside its files: an engine loads it as weights"
        size = sum(filesystem.size(f"{root}/{name}") for name in _weights(filesystem, root, row))
        if row["full_bytes"] not in (None, size):
            yield f"version {version} says {row['full_bytes']} bytes of weights, its files hold {size}"
        if version == 0 and row["template_hash"] != (found := _template(filesystem, root, row)):
            yield f"version 0 says chat template {row['template_hash'][:12]}, its files hold {found[:12]}"
    except OSError as error:
        if error.errno not in GONE:
            raise


def _weights(filesystem: Any, root: str, row: Row[WeightVersion]) -> list[str]:
    """Names of the files from which an engine loads tensors."""
    if INDEX in row["files"]:
        return sorted({*json.loads(filesystem.cat_file(f"{root}/{INDEX}"))["weight_map"].values()})
    return [name for name in row["files"] if name.endswith(WEIGHTS)]


def _template(filesystem: Any, root: str, row: Row[WeightVersion]) -> str:
    """sha256 hex of the chat template: its own file, or what the tokenizer's settings hold; of nothing without one."""
    if TEMPLATE in row["files"]:
        return hashlib.sha256(filesystem.cat_file(f"{root}/{TEMPLATE}")).hexdigest()
    settings = json.loads(filesystem.cat_file(f"{root}/{TOKENIZER}")) if TOKENIZER in row["files"] else {}
    template = settings.get("chat_template")
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True) if template else ""
    return hashlib.sha256(text.encode()).hexdigest()


def _delta(row: Row[WeightVersion]) -> str:
    """What is wrong with a version's delta; empty when it is as its event says, or was collected."""
    filesystem, path = fsspec.core.url_to_fs(row["delta"])
    try:
        size, found = filesystem.size(path), _sha256(filesystem, path)
    except OSError as error:
        if error.errno not in GONE:
            raise
        return ""
    said = (row["delta_bytes"], row["delta_hash"])
    if said == (size, found):
        return ""
    return f"the delta of version {row['version']} has {size} bytes and hash {found[:12]}, its event says otherwise"


def _sha256(filesystem: Any, path: str) -> str:
    digest = hashlib.sha256()
    with filesystem.open(path, "rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
