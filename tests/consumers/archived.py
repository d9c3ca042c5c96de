"""A log of which retention took what the archive keeps."""

from __future__ import annotations

from pathlib import Path

from millrace.infra.log.archive.archive import Archive
from millrace.infra.log.archive.archiver import Archiver
from millrace.infra.log.archive.bus import ArchivedBus
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.memory.bus import MemoryBus

LATE = 1e12
"""seconds: later than any record"""


def cut(bus: MemoryBus, namespace: str, root: Path, *, only: str = "") -> ArchivedBus:
    """The log with everything archived that may be, and every archived topic emptied. only: or this topic alone."""
    archive = Archive(str(root))
    archiver = Archiver(
        bus,
        archive,
        namespace,
        ClaimStore("memory://n"),
        segment_bytes=50_000,
        close_s=0,
        raw=True,
        clock=lambda: LATE,
    )
    for kept in list(archiver.run()):
        if not only or kept.topic == only:
            bus.delete_before(kept.topic, kept.partition, kept.segment.end)
    return ArchivedBus(bus, archive)
