"""The archive of Kafka's classes as the JVM has them in memory, parsed and verified: a start that maps it takes half
the processor time of one that reads the jars.

Invariants: nothing needs it: where there is none, or where its bytes are not those that were made, a broker starts all
the same. Its name is of the jars and of the Java that made it, so that it never meets others.

A JVM that maps a damaged archive may die of it, so its digest lies beside it and is compared before each start (60 MB,
50 ms).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from millrace.infra import durable


def place(java: Path, jars: Sequence[Path]) -> Path:
    """Where the archive for this Java and these jars (all in one folder) lies: beside their folder. Raises OSError
    where that Java is not there."""
    java = java.resolve(strict=True)
    stat = java.stat()
    identity = hashlib.sha256(f"{java}\n{stat.st_size}\n{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    home = jars[0].parent
    return home.with_name(f"{home.name}-{identity}.jsa")


def seal(archive: Path) -> None:
    """An archive is made: keep its digest beside it. Raises OSError."""
    durable.write(_seal(archive), _digest(archive))


def is_intact(archive: Path) -> bool:
    """Whether an archive is there, byte for byte as it was sealed."""
    try:
        return _seal(archive).read_text() == _digest(archive)
    except (OSError, UnicodeDecodeError):
        return False


def flags(java: Path, jars: Sequence[Path]) -> list[str]:
    """What tells that Java to map the archive, nothing where there is no whole one. One that does not fit it reads
    past, with a line in its log."""
    try:
        archive = place(java, jars)
    except OSError:
        return []
    return ["-Xshare:auto", f"-XX:SharedArchiveFile={archive}"] if is_intact(archive) else []


def _seal(archive: Path) -> Path:
    return archive.with_name(f"{archive.name}.sha256")


def _digest(archive: Path) -> str:
    with archive.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
