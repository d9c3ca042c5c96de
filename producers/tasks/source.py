"""Tasks from files: JSON lines, or a Hugging Face dataset directory.

Invariants: task number `i` is the same task in every process that reads the same files, and costs one seek; what is no
task is refused when the files are opened, so that a loader never stops in the middle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from pathlib import Path
from typing import Any

import orjson

from millrace.infra.errors import ConfigError

Task = dict[str, Any]


class TaskSource(ABC):
    """A fixed sequence of tasks."""

    @abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @abstractmethod
    def task(self, index: int) -> Task:
        """Task number `index`, 0 to len - 1."""

    def id(self, index: int, epoch: int) -> str:
        """The task's id: its own `id`, else its number. Later epochs have ids of their own."""
        base_id = self.task(index).get("id", f"task-{index}")
        return f"{base_id}@{epoch}" if epoch else str(base_id)


class JsonLines(TaskSource):
    """One or more files of JSON objects, one a line; empty lines are skipped."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._file = array("I")
        self._at = array("Q")
        for number, path in enumerate(paths):
            with path.open("rb") as file:
                at = 0
                for row, line in enumerate(file, 1):
                    if line.strip():
                        _parse(line, f"{path}:{row}")
                        self._file.append(number)
                        self._at.append(at)
                    at += len(line)
        if not self._at:
            raise ConfigError(f"{paths[0]} has no tasks: write one JSON object a line")

    def __len__(self) -> int:
        return len(self._at)

    def task(self, index: int) -> Task:
        path = self._paths[self._file[index]]
        with path.open("rb") as file:
            file.seek(self._at[index])
            return _parse(file.readline(), str(path))


def _parse(line: bytes, where: str) -> Task:
    try:
        task = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(task, dict):
        raise ConfigError(f"{where} is no JSON object: a task is one")
    return task


class Columns(TaskSource):
    """Parquet or Arrow files, by pyarrow."""

    def __init__(self, paths: list[Path]) -> None:
        import pyarrow as pa

        self._rows = pa.concat_tables([_table(path) for path in paths], promote_options="default")

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    def task(self, index: int) -> Task:
        return dict(self._rows.slice(index, 1).to_pylist()[0])


def _table(path: Path) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        if path.suffix == ".parquet":
            return parquet.read_table(path)
        with pa.memory_map(str(path)) as file:
            return pa.ipc.open_stream(file).read_all()
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{path} is no whole {path.suffix} file: {error}") from None


def open_tasks(path: Path) -> TaskSource:
    """The tasks at a path: a .jsonl file, or a dataset directory (its train split where it names one).

    Raises ConfigError when there is nothing that can be read."""
    if path.is_file():
        return Columns([path]) if path.suffix in (".parquet", ".arrow") else JsonLines([path])
    if not path.is_dir():
        raise ConfigError(f"there is no {path}: set [rollout] tasks to a JSONL file or a dataset directory")
    for suffixes, kind in (((".jsonl", ".json"), JsonLines), ((".parquet", ".arrow"), Columns)):
        files = [p for p in sorted(path.rglob("*")) if p.suffix in suffixes and p.stem not in METADATA]
        train = [p for p in files if "train" in str(p.relative_to(path))]
        if files:
            return kind(train or files)
    raise ConfigError(f"{path} holds no .jsonl, .parquet or .arrow file: is it a dataset directory?")


METADATA = {"dataset_info", "dataset_infos", "dataset_dict", "state"}
