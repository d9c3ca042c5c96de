"""Private directories of runs, which hold whatever hostile programs leave.

Invariants: each is locked while its run lasts, and one that nobody holds is swept; removing takes no recursion, follows
no link, holds two directories open however deep the tree is, and ends in time even where something goes on writing."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "millrace-tests-"
REMOVE_S = 10.0
"""after which the rest is left to the next sweep"""


@contextmanager
def directory() -> Iterator[Path]:
    """A new directory that is gone afterwards. Raises OSError where none can be made."""
    path, handle = _lock_new()
    try:
        yield path
    finally:
        try:
            remove(path, handle)
        finally:
            os.close(handle)


def sweep(parent: Path | None = None) -> int:
    """Remove the directories of runs whose process is gone. Returns how many."""
    count = 0
    with os.scandir(parent or tempfile.gettempdir()) as entries:
        names = [one.path for one in entries if one.name.startswith(PREFIX)]
    for path in names:
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(handle).st_uid == os.getuid():
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(Path(path), handle)
                    count += not os.path.lexists(path)
            finally:
                os.close(handle)
    return count


def remove(path: Path, handle: int) -> None:
    """Remove a directory that is open as `handle`: what lies in its directories is moved up into it, one by one."""
    end, number = time.monotonic() + REMOVE_S, 0
    with suppress(OSError):  # what cannot be removed stays
        os.fchmod(handle, 0o700)
        while (names := os.listdir(handle)) and time.monotonic() < end:
            for name in names:
                if time.monotonic() < end:
                    number = _flatten(handle, name, number)
        path.rmdir()


def _flatten(top: int, name: str, number: int) -> int:
    """Remove an entry of `top`, or move what is in it to `top` under numbers. Returns the next number."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=top)
        return number
    inner = _open_inner(top, name)
    try:
        for child in os.listdir(inner):
            if stat.S_ISDIR(os.stat(child, dir_fd=inner, follow_symlinks=False).st_mode):
                os.close(_open_inner(inner, child))  # a directory moves only where it may be written
            os.rename(child, f"{os.getpid()}-{time.monotonic_ns()}-{number}", src_dir_fd=inner, dst_dir_fd=top)
            number += 1
    finally:
        os.close(inner)
    with suppress(OSError):
        os.rmdir(name, dir_fd=top)
    return number


def _open_inner(parent: int, name: str) -> int:
    """A directory, which its owner may read and write from then on."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(handle)


def _lock_new() -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(handle, fcntl.LOCK_EX)  # waits for a sweep that came in between
        if path.exists():
            return path, handle
        os.close(handle)
