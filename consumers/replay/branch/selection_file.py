"""The selection of a branch, kept beside its versions: a branch that goes on learns from the same places in the same
order, with the same rewards, however the log has grown since, and whichever replays have judged it since; text is
written as of the same moment, and what it is written as is known by its digest.

Invariants: the file is whole or is not there; one process at a time decides what a branch begins with, and it holds the
lock beside the file until version 0, which names that, is in the log, or until it dies.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from millrace.consumers.replay.branch.items import BranchItem, digest
from millrace.infra import durable
from millrace.infra.errors import BranchError
from millrace.infra.log.base import Place

FILE = "selection.json"
LOCK = "beginning.lock"


class _StoredItem(msgspec.Struct):
    group: str
    places: list[tuple[str, int, int]]
    rewards: list[float | None]
    tokens: int
    texts: int = 0
    written: list[str] = []


class _File(msgspec.Struct):
    digest: str
    items: list[_StoredItem]
    source: str | None = None
    rubric: str | None = None
    as_of: datetime | None = None


@dataclass(frozen=True, slots=True)
class KeptItems:
    """Items, digest of their places, and whose rewards they have: None where they are the sealed ones. as_of: the
    moment, in local time, of which forms that say the time write text; None where a former release kept none."""

    items: list[BranchItem]
    digest: str
    source: str | None = None
    rubric: str | None = None
    as_of: datetime | None = None


def write(
    root: Path, items: list[BranchItem], as_of: datetime | None, source: str | None = None, rubric: str | None = None
) -> str:
    """Keep the items; gives the digest of their places. as_of: when they were selected, in local time; source, rubric:
    of the rewards, where a replay gave them."""
    content = [
        _StoredItem(
            item.group,
            [(p.topic, p.partition, p.offset) for p in item.places],
            [*item.rewards],
            item.tokens,
            item.texts,
            [*item.digests],
        )
        for item in items
    ]
    checksum = digest([place for item in items for place in item.places])
    root.mkdir(parents=True, exist_ok=True)
    durable.write(root / FILE, msgspec.json.encode(_File(checksum, content, source, rubric, as_of)))
    return checksum


@contextmanager
def beginning(root: Path) -> Iterator[None]:
    """Inside, nobody else begins the branch. Raises BranchError that names the process which does so already."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            policy = file.read() or "another process"
            raise BranchError(
                f"{policy} begins this branch already: let it, or end it and give the same command again"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        for draft in root.glob(f".{FILE}-*"):  # of one that died while it wrote
            draft.unlink()
        yield


def read(root: Path) -> KeptItems:
    """What was kept. Raises BranchError where it is gone or altered."""
    try:
        content = msgspec.json.decode((root / FILE).read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError) as error:
        raise BranchError(
            f"{root / FILE} cannot be read ({error}), and it says what the branch learns from: restore it, "
            "or make another branch"
        ) from None
    items = [
        BranchItem(
            one.group,
            tuple(Place(*place) for place in one.places),
            tuple(one.rewards),
            one.tokens,
            one.texts,
            tuple(one.written),
        )
        for one in content.items
    ]
    if digest([place for item in items for place in item.places]) != content.digest:
        raise BranchError(f"{root / FILE} was changed: restore it, or make another branch")
    return KeptItems(items, content.digest, content.source, content.rubric, content.as_of)
