"""Rows out of files: JSON lines (plain or gzip), Parquet, a Hugging Face dataset directory.

Invariants: one row, or one batch of columns, is in memory at a time, however long the file; a row that cannot be read
is named with its number and the next one is read; a file that cannot be read at all is an `ImportRefused`."""

from __future__ import annotations

import gzip
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import orjson

from millrace.dialects.shape import measure
from millrace.formats.episodes.rows import BadRow, ImportRow, without_nulls
from millrace.infra.errors import ImportRefused
from millrace.schemas import bounds

BATCH = 64
"""rows of columns that are read at once"""
LEVELS = 4 * bounds.DEPTH
"""of a row: an attribute of a span has four for each of what it holds"""
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"

Refuse = Callable[[int, BadRow], None]
"""hears of a row that cannot be imported: its number, and why"""
Watch = Callable[[int, int], None]
"""hears how far the reading is, and of how much"""


class RowReader(ABC):
    """The rows of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def rows(self, refuse: Refuse, watch: Watch) -> Iterator[ImportRow]:
        """Every row that can be read, in order. Raises ImportRefused where the file cannot be read on."""


class JsonLines(RowReader):
    """One object a line, UTF-8; empty lines are passed over."""

    def rows(self, refuse: Refuse, watch: Watch) -> Iterator[ImportRow]:
        total = self.path.stat().st_size
        with ExitStack() as stack:
            raw = stack.enter_context(self.path.open("rb"))
            packed = raw.read(2) == _GZIP
            raw.seek(0)
            file: IO[bytes] | gzip.GzipFile = stack.enter_context(gzip.open(raw)) if packed else raw
            number = 0
            while True:
                try:
                    line = file.readline(bounds.ROW_BYTES + 1)
                    number += 1
                    whole = len(line) <= bounds.ROW_BYTES
                    while not whole and not line.endswith(b"\n") and line:
                        line = file.readline(bounds.ROW_BYTES)
                except (EOFError, OSError, zlib.error) as error:
                    raise ImportRefused(f"{self.path} cannot be read behind line {number}: {error}") from None
                if not line and whole:
                    return
                watch(raw.tell(), total)
                try:
                    if not whole:
                        raise BadRow("row_too_large", f"the line has more than {bounds.ROW_BYTES:,} bytes (ROW_BYTES)")
                    if line.strip():
                        yield ImportRow(number, parsed(line))
                except BadRow as error:
                    refuse(number, error)


def parsed(line: bytes) -> dict[str, Any]:
    """The object of a line. Raises BadRow."""
    if line.count(b"[") + line.count(b"{") > LEVELS and measure(line).depth > LEVELS:
        raise BadRow("too_deep", f"the row nests more than {LEVELS} levels deep")
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BadRow("not_json", f"the line is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadRow("not_an_object", "the line is no JSON object: each line holds one row")
    row: dict[str, Any] = without_nulls(found)
    return row


class Parquet(RowReader):
    """A row a row."""

    def rows(self, refuse: Refuse, watch: Watch) -> Iterator[ImportRow]:
        import pyarrow as pa
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(self.path) as file:
                total, number = file.metadata.num_rows, 0
                for batch in file.iter_batches(batch_size=BATCH):
                    for content in batch.to_pylist():
                        number += 1
                        watch(number, total)
                        yield ImportRow(number, without_nulls(content))
        except (pa.ArrowException, OSError) as error:
            raise ImportRefused(f"{self.path} cannot be read as Parquet: {error}") from None


class Dataset(RowReader):
    """A directory that `datasets` saved, mapped into memory."""

    def rows(self, refuse: Refuse, watch: Watch) -> Iterator[ImportRow]:
        import datasets
        import pyarrow as pa

        if (self.path / "dataset_dict.json").is_file():
            splits = sorted(one.name for one in self.path.iterdir() if one.is_dir())
            raise ImportRefused(f"{self.path} holds several splits: name one of them, as {self.path / splits[0]}")
        try:
            # As Arrow: pictures and sounds are left as they lie there.
            found = datasets.load_from_disk(str(self.path)).with_format("arrow")
            total, number = len(found), 0
            for table in found.iter(batch_size=BATCH):
                for content in table.to_pylist():
                    number += 1
                    watch(number, total)
                    yield ImportRow(number, without_nulls(content))
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise ImportRefused(
                f"{self.path} is no dataset of Dataset.save_to_disk: {error}. Name a file of rows or such a directory"
            ) from None


def reader(path: Path) -> RowReader:
    """The reader of a file, by what lies there. Raises ImportRefused."""
    try:
        if path.is_dir():
            return Dataset(path)
        if not path.is_file():
            raise ImportRefused(f"there is no file {path}")
        with path.open("rb") as file:
            begin = file.read(4)
    except OSError as error:
        raise ImportRefused(f"{path} cannot be read: {error.strerror}") from None
    if begin == _PARQUET:
        return Parquet(path)
    if begin.lstrip()[:1] == b"[":
        raise ImportRefused(f"{path} is one JSON list: write an object a line, as `jq -c '.[]' {path}` does")
    return JsonLines(path)


def fingerprint(path: Path) -> list[tuple[str, int, int]]:
    """Changes when somebody writes to a file, or to one of a directory."""
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    stats = [(str(one), one.stat()) for one in files]
    return [(name, found.st_size, found.st_mtime_ns) for name, found in stats]
