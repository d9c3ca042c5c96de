"""The lock of a directory of tables, which says which process holds it and where that one answers queries.

Invariant: who only wants to ask loads no engine for it."""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path

from millrace.infra.errors import WarehouseError, WarehouseHeld


def holder(path: Path) -> tuple[int, str] | None:
    """Process id and URL of who holds a directory; None where nobody does."""
    with suppress(OSError):
        file = os.open(path / "lock", os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read(file)
        finally:
            os.close(file)
    return None


def lock(path: Path, url: str) -> int:
    """Take the lock of a directory, which is made where it is not; gives its file, which holds it while open."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise WarehouseError(f"{path} cannot be used ({error.strerror}): choose another [warehouse] home") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid, where = _read(file)
        os.close(file)
        advice = f"and answers at {where}: ask it there" if where else "and answers nobody: wait until it ends"
        raise WarehouseHeld(f"process {pid} holds the warehouse in {path} {advice}", pid, where) from None
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps({"pid": os.getpid(), "url": url}).encode(), 0)
    return file


def _read(file: int) -> tuple[int, str]:
    try:
        content = json.loads(os.pread(file, 4096, 0))
        return int(content["pid"]), str(content["url"])
    except (ValueError, KeyError, TypeError):
        return 0, ""
