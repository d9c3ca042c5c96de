"""Which segments a partition has: the manifest beside them.

Invariants: a segment covers every committed record of [first, end), so two that touch leave nothing out; segments lie
in the order of their offsets and never overlap; a file that no manifest names is no segment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import msgspec

from millrace.infra.errors import ArchiveError

RELEASE = 1


class Segment(msgspec.Struct, frozen=True):
    """One file. `size`: bytes of the file; `sha256`: of them; `since`, `until`: smallest and greatest time of its
    records, micros; `claims`: digest of each claim in it and the offset of the record that carries it."""

    first: int
    end: int
    records: int
    size: int
    sha256: str
    since: int
    until: int
    claims: dict[str, int] = {}

    @property
    def file(self) -> str:
        return f"{self.first:020d}.parquet"


class Shelf(msgspec.Struct, frozen=True):
    """The segments of one partition. `partitions`: how many its topic had when the newest was written."""

    topic: str
    partition: int
    partitions: int
    segments: tuple[Segment, ...] = ()
    release: int = RELEASE

    @property
    def end(self) -> int | None:
        """One past the last offset that is kept here; None when nothing is."""
        return self.segments[-1].end if self.segments else None

    def with_segment(self, segment: Segment, partitions: int) -> Shelf:
        """The shelf with one more segment behind the others. Raises ArchiveError when it would overlap."""
        if self.end is not None and segment.first < self.end:
            raise ArchiveError(f"{self.topic}/{self.partition} is archived up to {self.end}: {segment.first} is again")
        return msgspec.structs.replace(self, partitions=partitions, segments=(*self.segments, segment))

    def start(self, head: int) -> int:
        """Where the history begins that reaches without a hole up to offset `head` (the first that the topic holds)."""
        at = head
        for segment in reversed(self.segments):
            if segment.end < at:
                break
            at = min(at, segment.first)
        return at

    def within(self, start: int, end: int) -> Iterator[Segment]:
        """Segments that hold offsets of [start, end)."""
        return (segment for segment in self.segments if segment.first < end and segment.end > start)

    def holding(self, offset: int) -> Segment | None:
        """The segment that covers an offset."""
        at = bisect_right(self.segments, offset, key=lambda segment: segment.first) - 1
        return self.segments[at] if at >= 0 and offset < self.segments[at].end else None

    def holes(self) -> list[tuple[int, int]]:
        """Ranges between segments that were gone from the topic before they could be kept."""
        pairs = zip(self.segments, self.segments[1:], strict=False)
        return [(before.end, after.first) for before, after in pairs if before.end < after.first]


def encode(shelf: Shelf) -> bytes:
    """A manifest."""
    return msgspec.json.format(msgspec.json.encode(shelf), indent=1)


def decode(data: bytes, name: str) -> Shelf:
    """The shelf of a manifest. Raises ArchiveError for one that is damaged, or that a newer release wrote."""
    try:
        shelf = msgspec.json.decode(data, type=Shelf)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArchiveError(f"{name} is no manifest of an archive ({error}): restore it from a copy") from error
    if shelf.release > RELEASE:
        raise ArchiveError(f"{name} was written by a newer release of Millrace: read it with that one")
    firsts = [segment.first for segment in shelf.segments]
    ends = [segment.end for segment in shelf.segments]
    if any(end > first for end, first in zip(ends, firsts[1:], strict=False)):
        raise ArchiveError(f"{name} names segments that overlap: restore it from a copy")
    return shelf
