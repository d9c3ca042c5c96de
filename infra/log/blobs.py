"""Records too large for their topic: stored once under their own hash, carried in the log as a `Claim`.

Invariants: bytes are durable before a claim that names them is written; the same bytes are stored once; what `load`
returns has the hash and the size that were claimed; a store opens nothing outside its own root, whatever a claim says;
bytes that are stored again count as new, so that `remove` spares what somebody is about to claim.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from millrace.infra import durable, faults
from millrace.infra.errors import ClaimError, StorageError
from millrace.infra.log.base import Record
from millrace.schemas import codec
from millrace.schemas.records import Claim

LARGEST = 900_000
"""bytes of an encoded record that still fits a topic with Kafka's default limit, headers and framing included"""

_DIGEST = re.compile(r"[0-9a-f]{64}")
GONE_SUFFIX = ".gone"
"""how the name ends of what is being removed"""


class ClaimStore:
    """Claims under one root: a directory, or any fsspec URI that all processes of a deployment reach."""

    def __init__(self, root: str, beside: Callable[[str], bytes | None] | None = None) -> None:
        """beside: where else the bytes of a digest may be (an archive), asked when they are not here."""
        self._fs, path = storage(root)
        self._beside = beside
        self._root = path.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)
        self._folders = set[Path]()
        """those of digests that are on the disk, as this process knows"""

    def store(self, name: str, data: bytes) -> Claim:
        """Make the encoded bytes of a record called `name` durable; returns the Claim record for them."""
        digest = hashlib.sha256(data).hexdigest()
        path = f"{self._root}/{digest[:2]}/{digest}"
        if self._local:
            self._keep(Path(path), data)
        else:
            self._fs.pipe_file(path, data)
        return {"uri": self._fs.unstrip_protocol(path), "sha256": digest, "size": len(data), "name": name}

    def _keep(self, path: Path, data: bytes) -> None:
        folder = path.parent
        if folder not in self._folders or not folder.is_dir():
            durable.make_folder(folder)
            self._folders.add(folder)
        if _renew(path, len(data)):
            durable.flush(folder)  # whoever wrote it may not have come so far
        else:
            durable.write(path, data, mode=durable.SHARED_MODE, on_step=_mark_step)

    def fitting(self, name: str, data: bytes, largest: int = LARGEST) -> bytes:
        """What to write for the encoded bytes of a record called `name`: the bytes, or a claim where they are more than
        `largest`."""
        return data if len(data) <= largest else codec.encode("Claim", self.store(name, data))

    def load(self, claim: Claim) -> bytes:
        """The bytes behind a Claim record. Raises ClaimError when they are missing, foreign or changed, StorageError
        when nobody can tell."""
        path = f"{self._root}/{claim['sha256'][:2]}/{claim['sha256']}"
        if not _DIGEST.fullmatch(claim["sha256"]) or claim["uri"] != self._fs.unstrip_protocol(path):
            raise ClaimError(
                f"{claim['uri']} is not in this store ({self._root}): set the same claims directory everywhere"
            )
        try:
            data: bytes = self._fs.cat_file(path)
        except FileNotFoundError as error:
            copy = self._beside(claim["sha256"]) if self._beside else None
            if copy is not None and hashlib.sha256(copy).hexdigest() == claim["sha256"]:
                return copy
            raise ClaimError(
                f"{claim['uri']} cannot be read, it is not there: check that the claims directory is shared."
            ) from error
        except Exception as error:  # each kind of storage has errors of its own
            raise StorageError(f"{claim['uri']} cannot be read: {error}. Check that its storage answers.") from error
        if len(data) != claim["size"] or hashlib.sha256(data).hexdigest() != claim["sha256"]:
            raise ClaimError(f"{claim['uri']} holds other bytes than were claimed: restore it from a copy")
        return data

    def older(self, moment: float) -> Iterator[str]:
        """Digests of what was last stored before `moment` (seconds since the epoch). What a killed process left half
        written before then is removed on the way, what it left half removed is put back."""
        for path in self._fs.find(self._root) if self._fs.exists(self._root) else ():
            name = path.rpartition("/")[2]
            final_name = durable.final_name(name)
            digest, _, rest = (final_name or name).partition(".")
            if not _DIGEST.fullmatch(digest):
                continue
            if rest.endswith(GONE_SUFFIX):
                _put_back(Path(path))
            elif self._write_time(path) < moment:
                if final_name or rest:
                    self._fs.rm_file(path)
                else:
                    yield digest

    def remove(self, digest: str, moment: float) -> int:
        """Forget what was last stored before `moment` under its digest; gives its bytes, 0 when it is gone or was
        stored again."""
        path = f"{self._root}/{digest[:2]}/{digest}"
        if not self._local:
            if self._write_time(path) >= moment:
                return 0
            size = int(self._fs.size(path))
            self._fs.rm_file(path)
            return size
        # Out of the way first: who stores it from here on writes it anew, and who did before is seen by its time.
        gone_path = Path(f"{path}.{os.getpid()}{GONE_SUFFIX}")
        with suppress(FileNotFoundError):
            os.rename(path, gone_path)
            stat = gone_path.stat()
            if stat.st_mtime < moment:
                gone_path.unlink()
                return stat.st_size
            _put_back(gone_path)
        return 0

    def _write_time(self, path: str) -> float:
        """When a file was last written, in seconds since the epoch; never, so late, when it is gone."""
        with suppress(FileNotFoundError):
            return float(self._fs.modified(path).timestamp())
        return float("inf")

    def resolve(self, record: Record) -> Record:
        """The record itself, or, when it carries a claim, the record with the claimed bytes as its value."""
        data = None if record.value is None else self.behind(record.value)
        return record if data is record.value else replace(record, value=data)

    def behind(self, data: bytes) -> bytes:
        """Encoded bytes as they are, or, when they are a claim, the bytes that were claimed. Raises like `load`."""
        return data if codec.name_of(data) != "Claim" else self.load(codec.decode_as("Claim", data))


def storage(uri: str) -> tuple[Any, str]:
    """The file system behind a directory or URI, and the path in it. Raises ClaimError for one that is not installed
    here."""
    try:
        system, path = fsspec.core.url_to_fs(uri)
    except (ImportError, ValueError) as error:
        raise ClaimError(f"{uri} cannot be reached: {error}. It is set by `objects`.") from error
    return system, str(path)


def _renew(path: Path, size: int) -> bool:
    """Whether the whole file is there; it counts as new from now on."""
    try:
        os.utime(path)
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def _put_back(gone_path: Path) -> None:
    """Undo the beginning of a removal; what was written anew meanwhile stays."""
    path = gone_path.with_name(gone_path.name.partition(".")[0])
    with suppress(FileNotFoundError):
        if path.exists():
            gone_path.unlink()
        else:
            os.rename(gone_path, path)


def _mark_step(step: durable.Step) -> None:
    match step:
        case "filled":
            faults.point("claims.before_fsync")
        case "flushed":
            faults.point("claims.before_rename")
        case "named":
            faults.point("claims.after_rename")
