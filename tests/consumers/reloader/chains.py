"""Version directories that differ by little, their deltas, and the events of both."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from millrace.schemas.records import WeightVersion
from millrace.trainers.weights import delta_files
from millrace.trainers.weights.tensorfile import open_file
from tests.support.announced import weight_event
from tests.support.tiny_model import write_manifest


@dataclass(frozen=True, slots=True)
class Chain:
    """events: of versions 0 to n; every `every`-th is whole."""

    events: dict[int, WeightVersion]

    def folder(self, version: int) -> Path:
        """Where the learner left the version."""
        return Path(self.events[version]["uri"])

    def delta(self, version: int) -> Path:
        """Its delta file."""
        return Path(self.events[version]["delta"] or "")

    def hide(self, version: int) -> None:
        """Make the weights of the version's own directory unreadable: only its delta can bring it."""
        (self.folder(version) / "model.safetensors").unlink()


def write_chain(model: Path, root: Path, versions: int, *, every: int = 100) -> Chain:
    """`versions` directories after version 0, a copy of `model`, each with a few elements of the former one changed."""
    parent = Path(shutil.copytree(model, root / "v0-000000000000"))
    events = {0: weight_event(0, parent)}
    for version in range(1, versions + 1):
        draft = Path(shutil.copytree(parent, root / "draft"))
        _change(draft / "model.safetensors", version)
        digest = write_manifest(draft).digest
        folder = draft.rename(root / f"v{version}-{digest[:12]}")
        events[version] = weight_event(version, folder)
        if version % every:
            written = delta_files.write(parent, folder)
            assert written is not None
            sent = {"mode": "delta", "delta": str(written.path), "delta_hash": written.digest}
            events[version] |= {**sent, "delta_bytes": written.size, "full_bytes": written.full}  # type: ignore[typeddict-item]
        parent = folder
    return Chain(events)


def _change(path: Path, seed: int) -> None:
    file = open_file(path)
    random = np.random.default_rng(seed)
    with path.with_suffix(".new").open("wb") as out:
        out.write(file.header)
        for tensor in file.tensors.values():
            values = tensor.data.view("<f4").copy()
            values[random.random(values.size) < 0.02] *= np.float32(1.01)
            out.write(values.data)
    path.with_suffix(".new").rename(path)
