"""Where rows go: a file of JSON lines, a Parquet file, a dataset directory.

Invariants: a sink holds one batch of rows at a time; what it wrote is complete once it is closed, and nobody reads it
before, since it writes to a draft."""

from __future__ import annotations

import hashlib
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
from pyarrow import parquet

from millrace.formats.writers.base import ExportLayout

ROWS = 1024
"""rows of a batch"""
READ = 2**20


class Sink(ABC):
    """Takes rows, one after the other."""

    @abstractmethod
    def write(self, row: Mapping[str, Any]) -> None:
        """Take a row."""

    @abstractmethod
    def close(self) -> None:
        """Finish what was written."""


class JsonLines(Sink):
    """One object a line, UTF-8."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        path.chmod(0o600)

    def write(self, row: Mapping[str, Any]) -> None:
        try:
            line = orjson.dumps(row)
        except TypeError:  # a number of more than 64 bits, nesting of more than 254
            line = json.dumps(row).encode()
        self._file.write(line + b"\n")

    def close(self) -> None:
        self._file.close()


class ParquetFile(Sink):
    """One Parquet file, zstd."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.schema = schema
        self.rows = 0
        """taken so far"""
        self._waiting: list[Mapping[str, Any]] = []
        self._writer = parquet.ParquetWriter(path, schema, compression="zstd")
        path.chmod(0o600)

    def write(self, row: Mapping[str, Any]) -> None:
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


class Dataset(Sink):
    """A directory as `datasets` saves it: by way of a Parquet file, so that the rows never are in memory at once."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path = path
        path.mkdir(mode=0o700)
        self._aside = path / "rows.parquet"
        self._inner = ParquetFile(self._aside, schema)

    def write(self, row: Mapping[str, Any]) -> None:
        self._inner.write(row)

    def close(self) -> None:
        import datasets

        self._inner.close()
        cache = self._path / "cache"
        shown = datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            if self._inner.rows:
                made = datasets.Dataset.from_parquet(str(self._aside), cache_dir=str(cache))
            else:  # which from_parquet refuses
                columns = datasets.Features.from_arrow_schema(self._inner.schema)
                made = datasets.Dataset.from_dict({name: [] for name in columns}, features=columns)
            made.save_to_disk(str(self._path), num_shards=None if self._inner.rows else 1)
            del made
        finally:
            if not shown:
                datasets.enable_progress_bars()
            shutil.rmtree(cache, ignore_errors=True)
            with suppress(FileNotFoundError):
                self._aside.unlink()


def sink(layout: ExportLayout, path: Path) -> Sink:
    """The sink of a layout, at a path where nothing lies."""
    if layout.form == "jsonl":
        return JsonLines(path)
    assert layout.schema is not None, "a layout of columns names them"
    return ParquetFile(path, layout.schema) if layout.form == "parquet" else Dataset(path, layout.schema)


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
