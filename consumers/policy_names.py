"""What is named after a policy: its topics, its learners' group, the id that writes its versions, its directory."""

from __future__ import annotations

from pathlib import Path

from millrace.infra.config import Settings
from millrace.infra.errors import PolicyError
from millrace.infra.log.topics import full_name


def transactional_id(settings: Settings) -> str:
    """The one id under which versions of a policy are written: whoever opens it fences everybody before."""
    return group(settings)


def group(settings: Settings) -> str:
    """The consumer group of a policy's learners."""
    return full_name(settings.namespace, f"{settings.policy.name}.learn")


def topics(settings: Settings) -> dict[str, str]:
    """Full names of the policy's topics by their last word (weights, ledger, trajectories, ...)."""
    names = ("weights", "ledger", "trajectories", "resolutions", "completions")
    return {name: full_name(settings.namespace, f"{settings.policy.name}.{name}") for name in names}


def weights_root(settings: Settings) -> Path:
    """The directory of the policy's versions. Raises PolicyError for an object store, which needs a mount."""
    where = settings.weights.removeprefix("file://")
    if "://" in where:
        raise PolicyError(f"weights must lie in a directory that all learners share, not at {where}: mount it")
    return Path(where)
