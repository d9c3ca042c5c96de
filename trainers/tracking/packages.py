"""Packages that a tracker needs and that may be missing."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any

from millrace.trainers.errors import BadConfiguration

PACKAGES = {
    "tensorboard": "tensorboard.summary.writer.event_file_writer",
    "mlflow": "mlflow.tracking",
    "wandb": "wandb",
}
"""Tracker -> the module without which it does not open."""


def check(trackers: Iterable[str]) -> None:
    """Raises BadConfiguration where one of `trackers` lacks its package. Imports nothing heavy."""
    for tracker in trackers:
        top = PACKAGES.get(tracker, "").partition(".")[0]
        if top and not _there(top):
            raise BadConfiguration(_missing(tracker, top))


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # it was taken out of sys.modules by hand
        return False


def _missing(tracker: str, module: str) -> str:
    return (
        f"the tracker {tracker} needs {module}, which is not installed: run `make setup`, elsewhere "
        f"`pip install -e '.[tracking]'`, or leave {tracker} out"
    )


def package(name: str, tracker: str) -> Any:
    """The module `name`, imported now. Raises BadConfiguration where it is not installed, with what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BadConfiguration(f"{_missing(tracker, name)} ({error})") from error
