"""Trackers by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from millrace.trainers.errors import BadConfiguration
from millrace.trainers.tracking.base import Tracker
from millrace.trainers.tracking.jsonl import JsonlTracker
from millrace.trainers.tracking.services import MlflowTracker, TensorboardTracker, WandbTracker

TRACKERS: dict[str, Callable[[Path, str], Tracker]] = {
    "jsonl": lambda directory, run: JsonlTracker(directory),
    "tensorboard": lambda directory, run: TensorboardTracker(directory),
    "mlflow": MlflowTracker,
    "wandb": WandbTracker,
}
"""What opens each, from a directory of its own and the name of the run."""


def open_trackers(names: Iterable[str], directory: Path, run: str) -> list[Tracker]:
    """The trackers called `names`, each in `directory`/name. Raises BadConfiguration for one that is not known or not
    installed; then none is left open."""
    opened: list[Tracker] = []
    try:
        for name in dict.fromkeys(names):
            if name not in TRACKERS:
                raise BadConfiguration(f"no tracker {name!r}: choose {', '.join(TRACKERS)}")
            opened.append(TRACKERS[name](directory / name, run))
    except BaseException:
        for tracker in opened:
            tracker.close()
        raise
    return opened
