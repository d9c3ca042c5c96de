"""The process `millrace archive`, and what the archive of a deployment holds.

It looks at every topic again and again. It stops nothing and nobody waits for it: while it is away, topics keep what
they keep, so their retention must be longer than it may be away."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

from millrace.infra.config import Settings
from millrace.infra.connect import connect
from millrace.infra.errors import StorageError, UnreachableError
from millrace.infra.log.archive.archive import Archive
from millrace.infra.log.archive.archiver import ArchivedSegment, Archiver
from millrace.infra.log.archive.shelf import Shelf
from millrace.infra.log.base import Bus
from millrace.infra.log.blobs import ClaimStore

log = logging.getLogger(__name__)

LOOK_S = 30.0
"""between two looks at the topics"""


class ShelfTotals(NamedTuple):
    """One partition whose segments were read whole: how many there are, their records and the bytes of their files."""

    shelf: Shelf
    records: int
    size: int


def run(settings: Settings) -> None:
    """Archive what is due, until SIGTERM. Raises ArchiveError when the archive cannot be written or is damaged."""
    with connect(settings) as bus:
        while True:
            try:
                for entry in archiver(settings, bus).run():
                    log.info("archived %s/%d %s", entry.topic, entry.partition, segment_text(entry))
            except (UnreachableError, StorageError) as error:
                log.warning("tried again in %d s: %s", LOOK_S, error)
            time.sleep(LOOK_S)


def once(settings: Settings, bus: Bus) -> Iterator[ArchivedSegment]:
    """Archive everything that is written now, however young, and give each segment."""
    return archiver(settings, bus, close_s=0).run()


def archiver(settings: Settings, bus: Bus, close_s: float | None = None) -> Archiver:
    """What archives the namespace as `[archive]` says."""
    options = settings.archive
    return Archiver(
        bus,
        Archive(settings.archive_root),
        settings.namespace,
        ClaimStore(settings.claims),
        segment_bytes=options.segment_mb << 20,
        close_s=options.close_hours * 3600 if close_s is None else close_s,
        raw=options.raw,
    )


def shelves(settings: Settings) -> Iterator[Shelf]:
    """Every partition of which something is archived, by topic. Raises ArchiveError for a damaged manifest."""
    archive = Archive(settings.archive_root)
    for topic in archive.topics(f"{settings.namespace}."):
        yield from archive.shelves(topic).values()


def verify(settings: Settings, shelf: Shelf) -> ShelfTotals:
    """Read every segment of a partition. Raises ArchiveError naming the first that is damaged, and the offset."""
    archive = Archive(settings.archive_root)
    records = sum(1 for one in shelf.segments for _ in archive.rows(shelf.topic, shelf.partition, one))
    return ShelfTotals(shelf, records, sum(one.size for one in shelf.segments))


def segment_text(entry: ArchivedSegment) -> str:
    """A segment in words."""
    segment = entry.segment
    return f"offsets {segment.first} to {segment.end - 1}: {segment.records} records, {segment.size} bytes"
