"""Files of rows, read and written: JSON lines (read from gzip too), Parquet, a Hugging Face dataset directory.

Invariants: one row, or one batch of columns, is in memory at a time, however long the file; a row that cannot be read
is named with its number and the next one is read; a file that cannot be read at all is an `ImportRefused`; what a sink
wrote is complete once it is closed, and nobody reads it before, since it writes to a draft."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Literal

import orjson
import pyarrow as pa
from pyarrow import parquet

from millrace.dialects.shape import measure
from millrace.formats.episodes.rows import BadRow, ImportRow, without_nulls
from millrace.infra.errors import ImportRefused
from millrace.schemas import bounds
from millrace.schemas.json_values import JsonObject

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


class JsonLinesReader(RowReader):
    """One object a line, UTF-8; empty lines are passed over."""

    def rows(self, refuse: Refuse, watch: Watch) -> Iterator[ImportRow]:
        total = self.path.stat().st_size
        with ExitStack() as stack:
            raw = stack.enter_context(self.path.open("rb"))
            is_gzip = raw.read(2) == _GZIP
            raw.seek(0)
            file: IO[bytes] | gzip.GzipFile = stack.enter_context(gzip.open(raw)) if is_gzip else raw
            number = 0
            while True:
                try:
                    line = file.readline(bounds.ROW_BYTES + 1)
                    number += 1
                    fits = len(line) <= bounds.ROW_BYTES
                    while not fits and not line.endswith(b"\n") and line:
                        line = file.readline(bounds.ROW_BYTES)
                except (EOFError, OSError, zlib.error) as error:
                    raise ImportRefused(f"{self.path} cannot be read behind line {number}: {error}") from None
                if not line and fits:
                    return
                watch(raw.tell(), total)
                try:
                    if not fits:
                        raise BadRow("row_too_large", f"the line has more than {bounds.ROW_BYTES:,} bytes (ROW_BYTES)")
                    if line.strip():
                        yield ImportRow(number, parse_row(line))
                except BadRow as error:
                    refuse(number, error)


def parse_row(line: bytes) -> JsonObject:
    """The object of a line. Raises BadRow."""
    if line.count(b"[") + line.count(b"{") > LEVELS and measure(line).depth > LEVELS:
        raise BadRow("too_deep", f"the row nests more than {LEVELS} levels deep")
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BadRow("not_json", f"the line is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRow("not_an_object", "the line is no JSON object: each line holds one row")
    row: JsonObject = without_nulls(value)
    return row


class ParquetReader(RowReader):
    """A row a row."""

    def rows(self, refuse: Refuse, watch: Watch) -> Iterator[ImportRow]:
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


class DatasetReader(RowReader):
    """A directory that `datasets` saved, mapped into memory."""

    def rows(self, refuse: Refuse, watch: Watch) -> Iterator[ImportRow]:
        import datasets

        if (self.path / "dataset_dict.json").is_file():
            splits = sorted(one.name for one in self.path.iterdir() if one.is_dir())
            raise ImportRefused(f"{self.path} holds several splits: name one of them, as {self.path / splits[0]}")
        try:
            # As Arrow: pictures and sounds are left as they lie there.
            dataset = datasets.load_from_disk(str(self.path)).with_format("arrow")
            total, number = len(dataset), 0
            for table in dataset.iter(batch_size=BATCH):
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
            return DatasetReader(path)
        if not path.is_file():
            raise ImportRefused(f"there is no file {path}")
        with path.open("rb") as file:
            begin = file.read(4)
    except OSError as error:
        raise ImportRefused(f"{path} cannot be read: {error.strerror}") from None
    if begin == _PARQUET:
        return ParquetReader(path)
    if begin.lstrip()[:1] == b"[":
        raise ImportRefused(f"{path} is one JSON list: write an object a line, as `jq -c '.[]' {path}` does")
    return JsonLinesReader(path)


def fingerprint(path: Path) -> list[tuple[str, int, int]]:
    """Changes when somebody writes to a file, or to one of a directory."""
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    stats = [(str(one), one.stat()) for one in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


Form = Literal["jsonl", "parquet", "dataset"]
ROWS = 1024
"""rows of a batch"""
READ = 2**20


class Sink(ABC):
    """Takes rows, one after the other."""

    @abstractmethod
    def write(self, row: Mapping[str, object]) -> None:
        """Take a row."""

    @abstractmethod
    def close(self) -> None:
        """Finish what was written."""


class JsonLinesSink(Sink):
    """One object a line, UTF-8."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        path.chmod(0o600)

    def write(self, row: Mapping[str, object]) -> None:
        try:
            line = orjson.dumps(row)
        except TypeError:  # a number of more than 64 bits, nesting of more than 254
            line = json.dumps(row).encode()
        self._file.write(line + b"\n")

    def close(self) -> None:
        self._file.close()


class ParquetSink(Sink):
    """One Parquet file, zstd."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.schema = schema
        self.rows = 0
        """taken so far"""
        self._waiting: list[Mapping[str, object]] = []
        self._writer = parquet.ParquetWriter(path, schema, compression="zstd")
        path.chmod(0o600)

    def write(self, row: Mapping[str, object]) -> None:
        self.rows += 1
        self._waiting.append(row)
        if len(self._waiting) >= ROWS:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_batch(pa.RecordBatch.from_pylist(self._waiting, self.schema))
        self._waiting.clear()

    def close(self) -> None:
        if self._waiting:
            self._flush()
        self._writer.close()


class DatasetSink(Sink):
    """A directory as `datasets` saves it: by way of a Parquet file, so that the rows never are in memory at once."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path = path
        path.mkdir(mode=0o700)
        self._aside = path / "rows.parquet"
        self._inner = ParquetSink(self._aside, schema)

    def write(self, row: Mapping[str, object]) -> None:
        self._inner.write(row)

    def close(self) -> None:
        import datasets

        self._inner.close()
        cache = self._path / "cache"
        shows_progress = datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            if self._inner.rows:
                dataset = datasets.Dataset.from_parquet(str(self._aside), cache_dir=str(cache))
            else:  # which from_parquet refuses
                columns = datasets.Features.from_arrow_schema(self._inner.schema)
                dataset = datasets.Dataset.from_dict({name: [] for name in columns}, features=columns)
            dataset.save_to_disk(str(self._path), num_shards=None if self._inner.rows else 1)
            del dataset
        finally:
            if not shows_progress:
                datasets.enable_progress_bars()
            shutil.rmtree(cache, ignore_errors=True)
            with suppress(FileNotFoundError):
                self._aside.unlink()


def sink(form: Form, schema: pa.Schema | None, path: Path) -> Sink:
    """The sink of a form, at a path where nothing lies. schema: its columns, of forms that have any."""
    if form == "jsonl":
        return JsonLinesSink(path)
    assert schema is not None, "a layout of columns names them"
    return ParquetSink(path, schema) if form == "parquet" else DatasetSink(path, schema)


def digest(path: Path) -> str:
    """sha256 hex of a file; of a directory, over the name and the digest of each file in it, sorted by name."""
    out = hashlib.sha256()
    if path.is_dir():
        for file in sorted(one for one in path.rglob("*") if one.is_file()):
            out.update(f"{file.relative_to(path)}\0{digest(file)}\n".encode())
        return out.hexdigest()
    with path.open("rb") as content:
        while part := content.read(READ):
            out.update(part)
    return out.hexdigest()
