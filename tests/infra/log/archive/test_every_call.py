"""An archiver killed, or refused by the disk, at every call that changes a file: nothing lost, nothing doubled, and
whoever goes on ends with the same files."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from millrace.infra.errors import ArchiveError
from millrace.infra.log.archive.archive import Archive
from millrace.infra.log.base import Record
from tests.infra.log.archive.test_history import TOPIC, archiver
from tests.infra.log.archive.test_killed import filled, state

CALLS = ("open", "fsync", "rename", "replace", "unlink", "mkdir", "chmod", "ftruncate", "pwrite")
"""of the module os: pathlib and whoever writes files come by them"""
WRITES = ("write_batch", "close")
"""of a segment, whose bytes are written by native code"""
MOST = 400


def counted(patch: pytest.MonkeyPatch, root: Path, act: Callable[[int], None]) -> None:
    """Before each call that concerns what lies below `root`, `act` is told the number of it."""
    number = 0

    def stepped(function: Any, *, always: bool) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal number
            if always or any(str(root) in str(arg) for arg in args) or (args and isinstance(args[0], int)):
                number += 1
                act(number)
            return function(*args, **kwargs)

        return step

    for name in CALLS:
        patch.setattr(os, name, stepped(getattr(os, name), always=False))
    for name in WRITES:
        patch.setattr(pq.ParquetWriter, name, stepped(getattr(pq.ParquetWriter, name), always=True))


def die(wanted: int, at: int) -> None:
    if at == wanted:
        os.kill(os.getpid(), signal.SIGKILL)


def archive(root: Path) -> None:
    list(archiver(filled(), root, size=4000).run())


def read(root: Path) -> list[Record]:
    return [record for p in (0, 1) for record in Archive(str(root)).records(TOPIC, p, 0, 1000)]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clean")
    archive(root)
    return root


def whole() -> list[Record]:
    bus = filled()
    return [record for p in (0, 1) for record in bus.read(TOPIC, p)]


def judged(root: Path, clean: Path) -> int:
    """What is kept reads well; whoever goes on loses and doubles nothing. Gives how much was kept."""
    kept = read(root)
    records = {record.place: record for record in whole()}
    assert len({record.place for record in kept}) == len(kept)
    assert all(records[record.place] == record for record in kept)
    archive(root)
    assert read(root) == whole()
    assert state(root) == state(clean)
    return len(kept)


@pytest.mark.slow
def test_killed_at_every_call(clean: Path, tmp_path: Path) -> None:
    """Each time a process of its own, ended by SIGKILL: it cleans up nothing."""
    kept: set[int] = set()
    for number in range(1, MOST):
        root = tmp_path / str(number)
        pid = os.fork()
        if pid == 0:
            try:
                with pytest.MonkeyPatch.context() as patch:
                    counted(patch, root, partial(die, number))
                    archive(root)
            except BaseException:
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        kept.add(judged(root, clean))
        if code == 0:
            break
        assert code == -signal.SIGKILL, number
    assert number > 30, "calls were counted"
    assert kept > {0, len(whole())}, "it died before, between and after segments"


@pytest.mark.slow
def test_refused_by_the_disk_at_every_call(clean: Path, tmp_path: Path) -> None:
    """One call fails: a clear error, and the next archiver goes on; or it did not matter."""
    refused = 0
    for number in range(1, MOST):
        root, last = tmp_path / str(number), 0

        def act(at: int, number: int = number) -> None:
            nonlocal last
            last = at
            if at == number:
                raise OSError(errno.EIO, "Input/output error")

        with pytest.MonkeyPatch.context() as patch:
            counted(patch, root, act)
            try:
                archive(root)
            except ArchiveError as error:
                refused += "Input/output error" in str(error)
        judged(root, clean)
        if last < number:
            break
    assert refused > 20
