"""One durable write of a small file: a reader sees the old bytes or the new ones, before and after a power cut.

    bytes -> a draft beside the file -> fsync -> rename -> fsync of the folder

Invariants: nothing appears under the name but whole; when `write` returns, the file is on the disk; a process killed
inside leaves the old file and at most a draft, which no reader takes for anything. What is made `once` is the same for
all who ask, in every process and for good.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PRIVATE = 0o600


def write(path: Path, data: bytes | str, *, mode: int = PRIVATE, sync: bool = True) -> None:
    """Put `data` (text as UTF-8) in the place of the file `path`, whose folder is there. sync: whether it outlives a
    power cut, and not only the process. Raises OSError; then the old file stands."""
    draft = _draft(path)
    try:
        _fill(draft, data.encode() if isinstance(data, str) else data, mode, sync)
        draft.rename(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    if sync:
        flush(path.parent)


def once(path: Path, data: bytes) -> bytes:
    """Put `data` in the file `path`, unless it holds something already; gives what it holds. Of several that do so at
    once, the first decides. An empty file counts as none. Raises OSError."""
    if not path.is_file() or not path.stat().st_size:
        draft = _draft(path)
        try:
            _fill(draft, data, PRIVATE, sync=True)
            try:
                os.link(draft, path)
            except FileExistsError:
                if not path.stat().st_size:
                    draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    flush(path.parent)  # whoever else wrote it may not have come so far
    return path.read_bytes()


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """Inside, fill the draft that is given, a file or a folder, however long that takes; behind it stands under the
    name `path`, whole and on the disk. Where an error leaves the block, or `path` exists already (FileExistsError), the
    draft goes. Raises OSError."""
    draft = _draft(path)
    try:
        yield draft
        flush_all(draft)
        if path.exists():
            raise FileExistsError(f"{path} is there already")
        draft.rename(path)
    except BaseException:
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)
        raise
    flush(path.parent)


def flush_all(path: Path) -> None:
    """`flush` a file, or a folder with all that lies in it. Raises OSError."""
    for inside in path.rglob("*") if path.is_dir() else ():
        flush(inside)
    flush(path)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}-{secrets.token_hex(6)}")


def _fill(draft: Path, data: bytes, mode: int, sync: bool) -> None:
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def flush_tree(folder: Path) -> None:
    """`flush` a folder with all that lies in it, and its own name. Raises OSError."""
    for path in (*folder.rglob("*"), folder, folder.parent):
        flush(path)


def flush(path: Path) -> None:
    """Have the kernel put a file, or the names in a folder, on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
