"""What the models that a step reads beside its own hold: reference, teacher, reward model.

Invariant: a digest is of the content, so another model under the same path is another model, and the same one elsewhere
is not. A model is read once a process; files that were written since are read again."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from millrace.infra import config
from millrace.infra.errors import ConfigError
from millrace.trainers.backends.layout import FROZEN
from millrace.trainers.errors import CorruptCheckpoint
from millrace.trainers.weights.manifest import base_digest

SUFFIX = ".safetensors"


def digests(learner: config.Learner) -> dict[str, str]:
    """sha256 hex over configuration and weights of each frozen model that `[learner]` names, by role. Raises
    ConfigError for a directory that cannot be read."""
    named = {role: Path(path) for role in FROZEN if (path := getattr(learner, role))}
    return {role: _digest(role, directory) for role, directory in named.items()}


def _digest(role: str, directory: Path) -> str:
    try:
        files = sorted(path for path in directory.iterdir() if path.name == "config.json" or path.suffix == SUFFIX)
        states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return _content(directory, tuple(states))
    except (CorruptCheckpoint, OSError) as error:
        raise ConfigError(
            f"[learner] {role}: {directory} cannot be read ({error}): name a directory with a model in Hugging Face "
            "layout"
        ) from None


@cache
def _content(directory: Path, files: tuple[tuple[str, int, int], ...]) -> str:
    """files: name, size and time of each, so that what changed is read again."""
    return base_digest(directory)
