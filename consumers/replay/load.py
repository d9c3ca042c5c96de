"""A dumped step trained again, without the log."""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path

from millrace.consumers.replay import compare, same
from millrace.consumers.replay.crew import Crew
from millrace.consumers.replay.dump import on_record
from millrace.consumers.replay.orders import TrainedStep
from millrace.consumers.replay.prove import linked
from millrace.infra.config import Settings
from millrace.infra.errors import ProofError
from millrace.schemas.records import LedgerEntry
from millrace.trainers.weights import manifest


@dataclass(frozen=True, slots=True)
class Loaded:
    """What training a dumped step gave. differences: by what this place differs from the one on record; detail: the
    first file that differs, empty where none does."""

    entry: LedgerEntry
    trained: TrainedStep
    layout: str
    seconds: float
    differences: list[str]
    detail: str

    @property
    def equal(self) -> bool:
        """Bit for bit what is on record."""
        return self.trained.digest == self.entry["digest"]


def load(
    folder: Path, settings: Settings, private: Path, *, anyway: bool = False, context: BaseContext | None = None
) -> Loaded:
    """Train the step in `folder`; what is written goes under `private`, an empty folder.

    The configuration is the recorded one, where the step says it. anyway: train where something else differs from the
    record. Raises ProofError for what is no step, or differs."""
    entry, files, start = on_record(folder)
    if entry["config"]:
        settings = same.recorded(settings, entry)
    found = same.differences(same.here(settings), entry)
    if found and not anyway:
        raise ProofError(same.refusal([(entry["version"], found)]))
    root = private / "versions"
    root.mkdir(mode=0o700)
    for path in sorted(start.parent.iterdir()):
        linked(path, root)
    digest = manifest.load(root / start.name).digest
    world = len(entry["ranks"])
    begun = time.monotonic()
    with Crew(world, settings, context) as crew:
        formed = crew.form(settings, world, root / start.name, digest)
        trained = crew.train(folder, root)
    detail = "" if trained.digest == entry["digest"] else compare.first_file(files, trained.files)
    return Loaded(entry, trained, formed.layout, time.monotonic() - begun, found, detail)
