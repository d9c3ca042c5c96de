"""Records into a segment: as many as it may hold, with the bytes behind claims beside them.

Invariant: where a segment ends follows from the records and its size alone, so who was killed cuts the same again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from millrace.infra.errors import ClaimError, StorageError
from millrace.infra.log.archive.segment import SegmentWriter
from millrace.infra.log.archive.shelf import Segment
from millrace.infra.log.base import Record
from millrace.infra.log.blobs import ClaimStore
from millrace.schemas import codec
from millrace.schemas.errors import SchemaError

log = logging.getLogger(__name__)


class Ahead:
    """Records in order, of which the next one can be looked at; None behind the last."""

    def __init__(self, records: Iterator[Record]) -> None:
        self._records = records
        self.next = next(records, None)

    def go_on(self) -> None:
        self.next = next(self._records, None)


class Filling(NamedTuple):
    """A segment that was written into a draft, and whether it is as large as it may be."""

    segment: Segment
    is_full: bool


class Filler:
    """`size`: keys, values and claimed bytes of a full segment; `claims`: where the bytes behind claims lie."""

    def __init__(self, claims: ClaimStore, size: int) -> None:
        self._claims = claims
        self._size = size

    def fill(self, draft: Path, records: Ahead, first: int, end: int) -> Filling | None:
        """Write records into `draft` until it is full, or to the last; None without any. The segment reaches up to the
        next record, or to `end`, so that what lies between two is never only a transaction's marker."""
        claims, since, until = dict[str, int](), 0, 0
        with SegmentWriter(draft) as writer:
            while (record := records.next) is not None and writer.size < self._size:
                records.go_on()
                digest, body = self._behind(record)
                if digest:
                    claims[digest] = record.offset
                since = min(since, record.timestamp) if writer.records else record.timestamp
                until = max(until, record.timestamp)
                writer.add(record, body)
        if not writer.records:
            return None
        with draft.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        last = end if records.next is None else records.next.offset
        segment = Segment(first, last, writer.records, draft.stat().st_size, sha256, since, until, claims)
        return Filling(segment, writer.size >= self._size)

    def _behind(self, record: Record) -> tuple[str, bytes | None]:
        """The digest and the bytes behind a record that is a claim; nothing for any other, or where they are gone."""
        value = record.value or b""
        try:
            claim = codec.decode_as("Claim", value)
        except SchemaError:
            return "", None
        try:
            return claim["sha256"], self._claims.load(claim)
        except StorageError:
            raise
        except ClaimError as error:
            log.warning("%s/%d@%d: archived without what it claims: %s", *record.place, error)
            return "", None
