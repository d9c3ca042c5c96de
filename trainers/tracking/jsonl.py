"""Points as lines of a file: {"step": 3, "loss": 0.25, ...}. Needs nothing installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from millrace.trainers.tracking.base import Tracker

NAME = "metrics.jsonl"


class JsonlTracker(Tracker):
    """Appends to `metrics.jsonl` in `directory`. A line that a kill cut short is taken away when it is opened."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / NAME).open("a+b")
        self._file.seek(0)
        self._last = -1
        complete = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            complete += len(line)
            self._last = int(json.loads(line)["step"])
        self._file.truncate(complete)

    @property
    def last(self) -> int:
        return self._last

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write((json.dumps({"step": step, **metrics}) + "\n").encode())
        self._file.flush()
        self._last = step

    def close(self) -> None:
        self._file.close()


def points(directory: Path) -> list[dict[str, float]]:
    """Every point in `directory`, in order."""
    path = directory / NAME
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.is_file() else []
