"""One segment: a range of one partition as a Parquet file.

Invariants: a record comes back with the bytes it had (key, value, headers, time), holes stay holes; each row carries a
digest of its own, so that a damaged file is named with the first offset that cannot be trusted. The bytes behind a
claim lie beside it in the same row, since the store of claims forgets what no topic refers to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypedDict, cast

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.infra.errors import ArchiveError
from millrace.infra.log.base import Record

SCHEMA = pa.schema(
    [
        ("offset", pa.int64()),
        ("timestamp", pa.int64()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))),
        ("claimed", pa.binary()),
        ("digest", pa.binary(16)),
    ]
)
"""`timestamp` in micros; `value` null is a tombstone; `claimed` null where the value is no claim"""
GROUP_BYTES = 4 << 20
"""of values in a row group: what is read, and found damaged, at once"""
GROUP_ROWS = 10_000


class _Header(TypedDict):
    name: str
    value: bytes


class _Row(TypedDict):
    """A row of `SCHEMA` in Python's types."""

    offset: int
    timestamp: int
    key: bytes
    value: bytes | None
    headers: list[_Header]
    claimed: bytes | None
    digest: bytes


class ArchivedRecord(NamedTuple):
    """A record of a segment, and the bytes behind it where it is a claim."""

    record: Record
    claimed: bytes | None


def digest_of(record: Record, body: bytes | None) -> bytes:
    """Of all that a row says (16 bytes): each part goes in behind its length."""
    digest = hashlib.blake2b(digest_size=16)
    numbers = b"%d,%d" % (record.offset, record.timestamp)
    headers = [part for name, value in record.headers.items() for part in (name.encode(), value)]
    for part in (numbers, record.key, record.value, body, *headers):
        digest.update(b"-" if part is None else b"%d:" % len(part))
        digest.update(part or b"")
    return digest.digest()


class SegmentWriter:
    """Writes a segment into a file that is nobody's yet. `size`: bytes of keys and values so far."""

    def __init__(self, path: Path) -> None:
        self._rows: list[ArchivedRecord] = []
        self._pending = 0
        self.records = 0
        self.size = 0
        self._file = pq.ParquetWriter(
            path, SCHEMA, compression="zstd", compression_level=1, write_page_checksum=True, use_dictionary=["key"]
        )

    def add(self, record: Record, body: bytes | None) -> None:
        """The next record, in the order of offsets."""
        self._rows.append(ArchivedRecord(record, body))
        size = len(record.key) + len(record.value or b"") + len(body or b"")
        self._pending += size
        self.size += size
        self.records += 1
        if self._pending >= GROUP_BYTES or len(self._rows) >= GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        """Write what is left; the file is whole then, and not yet on the disk. Idempotent."""
        self._flush()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _flush(self) -> None:
        if self._rows:
            self._file.write_batch(_batch(self._rows))
        self._rows, self._pending = [], 0


def _batch(rows: list[ArchivedRecord]) -> pa.RecordBatch:
    records = [row.record for row in rows]
    headers = [[{"name": name, "value": value} for name, value in record.headers.items()] for record in records]
    columns = (
        [record.offset for record in records],
        [record.timestamp for record in records],
        [record.key for record in records],
        [record.value for record in records],
        headers,
        [row.claimed for row in rows],
        [digest_of(*row) for row in rows],
    )
    return pa.record_batch([pa.array(c, field.type) for c, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


def read(data: pa.Buffer, topic: str, partition: int, name: str) -> Iterator[ArchivedRecord]:
    """The records of a segment's bytes, in order. `name` says in errors which segment it is.

    Raises ArchiveError at the first record that is not what was written."""
    last = -1
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        groups = range(file.num_row_groups)
        if not file.schema_arrow.equals(SCHEMA):
            raise ArchiveError(f"{name} has other columns than a segment: restore it from a copy")
        for group in groups:
            for row in cast(list[_Row], file.read_row_group(group).to_pylist()):  # its schema is SCHEMA
                entry = _entry_of(row, topic, partition)
                if entry.record.offset <= last or digest_of(*entry) != row["digest"]:
                    raise ArchiveError(f"{name} is damaged at offset {entry.record.offset}: restore it from a copy")
                last = entry.record.offset
                yield entry
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        where = f"behind offset {last}" if last >= 0 else "from its beginning"
        raise ArchiveError(f"{name} is damaged {where} ({error}): restore it from a copy") from error


def _entry_of(row: _Row, topic: str, partition: int) -> ArchivedRecord:
    headers = {header["name"]: header["value"] for header in row["headers"]}
    record = Record(topic, partition, row["offset"], row["key"], row["value"], headers, row["timestamp"])
    return ArchivedRecord(record, row["claimed"])
