"""The folder of one replay, for its owner alone, and what killed ones left behind.

Invariant: a folder is locked for as long as its process lives, so one that can be locked is nobody's.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "millrace-replay-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder below the one for temporary files, removed at the end, as are those of replays that were
    killed."""
    sweep(Path(tempfile.gettempdir()))
    folder, handle = _locked()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _locked() -> tuple[Path, int]:
    """A new folder with its lock. Another process may sweep it away before it is locked: then another one."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with suppress(FileNotFoundError):
            handle = os.open(folder, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if folder.exists():
                return folder, handle
            os.close(handle)


def sweep(root: Path) -> list[Path]:
    """Remove the folders under `root` that this user's replays left; gives them."""
    folders: list[Path] = []
    for path in root.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                folders.append(path)
            finally:
                os.close(handle)
    return folders
