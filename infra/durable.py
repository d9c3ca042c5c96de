"""The one durable write: a reader sees the old or the new, whole, before and after a power cut.

    draft beside it (.tmp-NAME-random) -> fsync of its bytes -> rename -> fsync of the folder

Invariants: nothing appears under the name but whole; when a function returns, what it wrote is on the disk under that
name; a process killed inside leaves the old and at most a draft, which no reader takes for anything and `meant` tells
from all else; no two writers share a draft, in whatever processes, containers or machines they are. What is made `once`
is the same for all who ask, in every process and for good.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

PRIVATE_MODE = 0o600
SHARED_MODE = 0o666
"""as the umask says"""
DRAFT = ".tmp-"
"""how the name of a draft begins"""

Step = Literal["filled", "flushed", "named"]
"""what was done: the bytes are in the draft; they are on the disk; they have their name, maybe in memory alone"""
OnStep = Callable[[Step], None]


def _ignore(step: Step) -> None:
    """The default listener."""


def write(
    path: Path, data: bytes | str, *, mode: int = PRIVATE_MODE, sync: bool = True, on_step: OnStep = _ignore
) -> None:
    """Put `data` (text as UTF-8) in the place of the file `path`, whose folder is there. sync: whether it outlives a
    power cut, and not only the process. on_step: hears of each step. Raises OSError; then the old file stands."""
    draft = draft_of(path)
    try:
        _fill(draft, data.encode() if isinstance(data, str) else data, mode)
        on_step("filled")
        name(draft, path, sync=sync, on_step=on_step)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def once(path: Path, data: bytes) -> bytes:
    """Put `data` in the file `path`, unless it holds something already; gives what it holds. Of several that do so at
    once, the first decides. An empty file counts as none. Raises OSError."""
    if not path.is_file() or not path.stat().st_size:
        draft = draft_of(path)
        try:
            _fill(draft, data, PRIVATE_MODE)
            flush(draft)
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
def drafting(path: Path, *, replace: bool = False, sync: bool = True) -> Iterator[Path]:
    """Inside, fill the draft that is given, a file or a folder, however long that takes; behind it stands under the
    name `path`, whole and, with `sync`, on the disk. Where an error leaves the block, or `path` exists already and is
    not to be replaced (FileExistsError), the draft goes. Raises OSError."""
    draft = draft_of(path)
    try:
        yield draft
        if sync:
            flush_all(draft)
        if path.exists() and not replace:
            raise FileExistsError(f"{path} is there already")
        rename(draft, path, sync=sync)
    except BaseException:
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)
        raise


def name(draft: Path, path: Path, *, backup: Path | None = None, sync: bool = True, on_step: OnStep = _ignore) -> None:
    """Give a filled draft, a file or a folder on the disk of `path`, that name. backup: where what stands there goes
    first, by one rename; without it a file is replaced, and a folder that holds something is an error. Raises OSError;
    then, unless it was the last flush that failed, the draft still lies where it was."""
    if sync:
        flush_all(draft)
    on_step("flushed")
    rename(draft, path, backup=backup, sync=sync, on_step=on_step)


def rename(
    draft: Path, path: Path, *, backup: Path | None = None, sync: bool = True, on_step: OnStep = _ignore
) -> None:
    """`name` for a draft whose bytes are on the disk already, or need not be. Raises OSError."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise FileExistsError(f"{path} is a device or a pipe, which a file cannot replace: name a file")
    if backup is not None and path.exists():
        path.rename(backup)
    draft.rename(path)
    on_step("named")
    if sync:
        flush(path.parent)


def draft_of(path: Path) -> Path:
    """Where to prepare what is to be named `path`: beside it, and nobody else's. Nothing is made."""
    return path.with_name(f"{DRAFT}{path.name}-{secrets.token_hex(6)}")


def final_name(name: str) -> str:
    """The name that a draft was to get; empty for a name that is no draft's. Pure."""
    final, dash, tail = name.removeprefix(DRAFT).rpartition("-")
    return final if dash and name.startswith(DRAFT) and len(tail) == 12 and tail.isalnum() else ""


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Have the folder `path`, with those above it, there and on the disk. Raises OSError."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode, parents=True, exist_ok=True)
    for folder in missing or [path]:  # whoever else made it may not have come so far
        with suppress(PermissionError):  # names in a folder that may not be read are the kernel's to write
            flush(folder.parent)


def flush_all(path: Path) -> None:
    """`flush` a file, or a folder with all that lies in it. Raises OSError."""
    for inside in path.rglob("*") if path.is_dir() else ():
        flush(inside)
    flush(path)


def flush(path: Path) -> None:
    """Have the kernel put a file, or the names in a folder, on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fill(draft: Path, data: bytes, mode: int) -> None:
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
