"""A committed version to evaluate, as the policy's own topics name it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millrace.consumers import policy_names
from millrace.infra.config import Settings
from millrace.infra.connect import connect
from millrace.infra.errors import PolicyError
from millrace.infra.log.base import Bus
from millrace.infra.log.history import newest
from millrace.infra.versions import directory


@dataclass(frozen=True, slots=True)
class EvaluationSubject:
    """path: its directory; ledger_hash: hex, of its entry, which chains it to all before."""

    policy: str
    version: int
    path: Path
    digest: str
    ledger_hash: str


def version_to_evaluate(settings: Settings, version: int | None = None, *, files: bool = True) -> EvaluationSubject:
    """A version of the configured policy, the newest by default, read from its broker."""
    with connect(settings) as bus:
        return find(settings, bus, version, files=files)


def find(settings: Settings, bus: Bus, version: int | None = None, *, files: bool = True) -> EvaluationSubject:
    """The same from a bus. Raises PolicyError where there is no such version, or its `files` are wanted and gone."""
    names = policy_names.topics(settings)
    head = newest.head(bus, names["weights"], names["ledger"])
    if head is None:
        raise PolicyError(
            f"policy {settings.policy.name} does not exist: `millrace policy create --model DIR` begins it"
        )
    version_head = head
    if version is not None and version != head.version:
        older = newest.older(bus, names["weights"], names["ledger"], version)
        if older is None:
            raise PolicyError(f"there is no version {version}: the newest is {head.version}")
        version_head = older
    weights, entry = version_head.weights, version_head.entry
    path = directory(weights, settings.weights)
    if files and not path.is_dir():
        raise PolicyError(
            f"the files of version {entry['version']} are gone ({path}): [learner] keep and keep_every say which stay"
        )
    return EvaluationSubject(settings.policy.name, entry["version"], path, weights["digest"], entry["hash"].hex())
