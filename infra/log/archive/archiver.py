"""Archives what is closed: everything behind the last segment of a partition, cut by size, the rest by age.

Invariants: only committed records below the stable end are archived, each in exactly one segment; where a range is cut
follows from the records alone, so a killed archiver cuts the same again; a topic that was made anew under an old name
is never appended to the old one's segments. What no topic may keep longer (`raw`, unless it is asked for) and what is
compacted is left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from millrace.infra.errors import ArchiveError
from millrace.infra.log.archive.archive import Archive
from millrace.infra.log.archive.filling import Ahead, Filler
from millrace.infra.log.archive.shelf import Segment, Shelf
from millrace.infra.log.base import Bus, Place
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.topics import logical_name

log = logging.getLogger(__name__)

STATES = frozenset({"principals", "workers"})
"""topics beside changelogs that forget by key: they hold a state, no history"""
RAW_TOPIC = "raw"
"""what is captured before governance: it is gone when its hours are over"""


class ArchivedSegment(NamedTuple):
    """A segment that was just archived."""

    topic: str
    partition: int
    segment: Segment


def is_archived(topic: str, *, raw: bool) -> bool:
    """Whether a topic (full name) is one that is archived."""
    name = logical_name(topic)
    return name not in STATES and not name.startswith("changelog.") and (raw or name != RAW_TOPIC)


class Archiver:
    """Archives one namespace. `segment_bytes`: keys, values and claimed bytes of a full segment; `close_s`: the age of
    its oldest record from which a smaller one is closed; `raw`: also what governance has not seen."""

    def __init__(
        self,
        bus: Bus,
        archive: Archive,
        namespace: str,
        claims: ClaimStore,
        *,
        segment_bytes: int = 64 << 20,
        close_s: float = 6 * 3600.0,
        raw: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._bus = bus
        self._archive = archive
        self._prefix = f"{namespace}."
        self._filler = Filler(claims, segment_bytes)
        self._close_s = close_s
        self._raw = raw
        self._clock = clock

    def run(self) -> Iterator[ArchivedSegment]:
        """Archive all that is due now, and give each segment once it is kept.

        Raises ArchiveError, BusError, StorageError; what was given before stays kept."""
        try:
            with self._archive.writing():
                for topic in self._bus.topics(self._prefix):
                    if is_archived(topic, raw=self._raw):
                        for partition in range(self._bus.partitions(topic)):
                            yield from self._partition(topic, partition)
        except OSError as error:
            root = self._archive.root
            raise ArchiveError(
                f"{root} cannot be written ({error}): make room, or name another [archive] root"
            ) from error

    def _partition(self, topic: str, partition: int) -> Iterator[ArchivedSegment]:
        shelf = self._shelf(topic, partition)
        start, end = self._bus.starts(topic)[partition], self._bus.ends(topic)[partition]
        at = start if shelf.end is None else shelf.end
        if start > at:
            log.warning("%s/%d: offsets %d to %d were gone before they were archived", topic, partition, at, start)
            at = start
        records = Ahead(self._bus.read(topic, partition, at, end))
        while at < end:
            with self._archive.drafting(topic, partition) as draft:
                filling = self._filler.fill(draft, records, at, end)
                if filling is None or (not filling.is_full and filling.segment.since > self._age_limit()):
                    return
                shelf = self._archive.add(shelf, filling.segment, draft)
            at = filling.segment.end
            yield ArchivedSegment(topic, partition, filling.segment)

    def _age_limit(self) -> float:
        """The time (micros) of a record from which on it is too young for a segment that is not full."""
        return (self._clock() - self._close_s) * 1e6

    def _shelf(self, topic: str, partition: int) -> Shelf:
        """The partition's shelf, with the topic as it is now. Raises ArchiveError when it is another topic's."""
        partitions = self._bus.partitions(topic)
        shelf = self._archive.shelf(topic, partition)
        if shelf is None:
            return Shelf(topic, partition, partitions)
        if shelf.end is not None and not self._is_same_topic(shelf, shelf.end):
            raise ArchiveError(
                f"{topic}/{partition} was made anew since {self._archive.root} was written: archive into another "
                "directory ([archive] root)"
            )
        return Shelf(topic, partition, partitions, shelf.segments)

    def _is_same_topic(self, shelf: Shelf, end: int) -> bool:
        """Whether the topic is the one that was archived: it reaches as far, and what both keep last is the same."""
        if self._bus.log_ends(shelf.topic)[shelf.partition] < end:
            return False
        last = shelf.segments[-1]
        newest = None
        for row in self._archive.rows(shelf.topic, shelf.partition, last):
            newest = row.record
        if newest is None or newest.offset < self._bus.starts(shelf.topic)[shelf.partition]:
            return True
        record = self._bus.fetch([Place(shelf.topic, shelf.partition, newest.offset)])[0]
        if record is None:  # it may have been forgotten meanwhile
            return newest.offset < self._bus.starts(shelf.topic)[shelf.partition]
        return (record.key, record.value) == (newest.key, newest.value)
