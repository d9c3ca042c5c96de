"""Rows of a data set: a JSONL file, a directory that `datasets` saved, or parquet files. Every row says where it is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.schemas.json_values import Json, JsonObject
from millrace.trainers.errors import BadData

DISK_MARKS = ("state.json", "dataset_dict.json")
"""What a directory holds that `datasets` saved."""


@dataclass(frozen=True, slots=True)
class DataRow:
    """where: file:line, or directory:row. content: its columns, without those that are null. problem: why it has
    none."""

    where: str
    content: Mapping[str, Json]
    problem: str | None = None


def read(path: Path) -> Iterator[DataRow]:
    """All rows at `path`, in order. Raises BadData when there is nothing to read."""
    if path.is_file():
        yield from _parquet(path) if path.suffix == ".parquet" else _lines(path)
    elif not path.is_dir():
        raise BadData(f"there is no {path}: name a JSONL file or a dataset directory")
    elif any((path / name).is_file() for name in DISK_MARKS):
        yield from _from_disk(path)
    else:
        files = sorted(file for file in path.rglob("*") if file.suffix in (".jsonl", ".parquet"))
        files = [file for file in files if "train" in str(file.relative_to(path))] or files
        if not files:
            raise BadData(f"{path} was not saved by `datasets`, and holds no .jsonl or .parquet file")
        for file in files:
            yield from read(file)


def _lines(path: Path) -> Iterator[DataRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                content = json.loads(line)
            except ValueError as error:
                yield DataRow(where, {}, f"not JSON: {error}")
                continue
            except RecursionError:
                yield DataRow(where, {}, "nested too deeply")
                continue
            if isinstance(content, dict):
                yield DataRow(where, _present(content))
            else:
                yield DataRow(where, {}, "not a JSON object")


def _parquet(path: Path) -> Iterator[DataRow]:
    from pyarrow.parquet import ParquetFile

    number = 0
    with ParquetFile(path) as file:
        for batch in file.iter_batches():
            for content in batch.to_pylist():
                yield DataRow(f"{path}:{number}", _present(content))
                number += 1


def _from_disk(path: Path) -> Iterator[DataRow]:
    import datasets

    dataset = datasets.load_from_disk(str(path))
    if isinstance(dataset, datasets.DatasetDict):
        if "train" not in dataset:
            raise BadData(f"{path} has the splits {', '.join(dataset)}: name the directory of one of them")
        dataset = dataset["train"]
    for number, content in enumerate(dataset):
        yield DataRow(f"{path}:{number}", _present(content))


def _present(content: Mapping[str, Json]) -> JsonObject:
    return {name: value for name, value in content.items() if value is not None}
