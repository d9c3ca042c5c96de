"""How far a fuzz has come, over all the processes that send its inputs.

Invariants: each part of a run is one file of a folder, written whole; who reads them needs nothing of who writes; where
no run was asked for, nothing is written."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

FOLDER = "MILLRACE_FUZZ_COUNTS"
"""in the environment: where the parts of a run are, set by who shows them"""
EVERY_S = 1.0


class Part:
    """Inputs of one test, of which it sends `asked`."""

    def __init__(self, name: str, asked: int) -> None:
        self.name, self.asked, self.done = name, asked, 0
        self.seen: Counter[str] = Counter()
        self._began = self._told = time.monotonic()
        self._tell()

    def add(self, seen: object, count: int = 1) -> None:
        """Inputs were answered, with this status or in this way."""
        self.seen[str(seen)] += count
        self.done += count
        if time.monotonic() - self._told >= EVERY_S:
            self._tell()

    def end(self) -> None:
        """No more of them come."""
        self._tell()
        print(self)

    def __str__(self) -> str:
        return line(self.name, self._said())

    def _said(self) -> dict[str, object]:
        spent = time.monotonic() - self._began
        return {"asked": self.asked, "done": self.done, "spent_s": spent, "seen": dict(sorted(self.seen.items()))}

    def _tell(self) -> None:
        self._told = time.monotonic()
        if folder := os.environ.get(FOLDER):
            path = Path(folder) / f"{self.name}-{os.getpid()}.json"
            beside = path.with_suffix(".part")
            beside.write_text(json.dumps(self._said()))
            beside.replace(path)


def line(name: str, said: dict[str, object]) -> str:
    """What one part came to."""
    done, spent = int(str(said["done"])), float(str(said["spent_s"]))
    return f"{name}: {done:,} inputs in {spent:.1f} s ({done / max(spent, 1e-9):.0f} a second): {said['seen']}"


def read(folder: Path) -> dict[str, dict[str, object]]:
    """Every part of a run, by its name."""
    return {path.stem.rpartition("-")[0]: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def progress(parts: dict[str, dict[str, object]], asked: int, spent_s: float) -> str:
    """How far a run of `asked` inputs is after these seconds."""
    done = sum(int(str(said["done"])) for said in parts.values())
    rate = done / max(spent_s, 1e-9)
    left = f"{(asked - done) / rate / 60:.0f} min left" if done else "no input is answered yet"
    return f"{done:,} of {asked:,} inputs, {rate:.0f} a second, {left}"
