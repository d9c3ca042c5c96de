"""A committed version to evaluate, as the policy's own topics name it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from consumers import ledger, policy
from infra.bus.base import Bus, Record
from infra.bus.connect import connect
from infra.config import Settings
from infra.errors import PolicyError
from schemas import codec
from schemas.records import LedgerEntry, WeightVersion


@dataclass(frozen=True, slots=True)
class Committed:
    """path: its directory; ledger_hash: hex, of its entry, which chains it to all before."""

    policy: str
    version: int
    path: Path
    digest: str
    ledger_hash: str


def committed(settings: Settings, version: int | None = None, *, files: bool = True) -> Committed:
    """A version of the configured policy, the newest by default, read from its broker."""
    with connect(settings) as bus:
        return find(settings, bus, version, files=files)


def find(settings: Settings, bus: Bus, version: int | None = None, *, files: bool = True) -> Committed:
    """The same from a bus. Raises PolicyError where there is no such version, or its `files` are wanted and gone."""
    names = policy.topics(settings)
    head = ledger.head(bus, names["weights"], names["ledger"])
    if head is None:
        raise PolicyError(
            f"policy {settings.policy.name} does not exist: `millrace policy create --model DIR` begins it"
        )
    weights, entry = head.weights, head.entry
    if version is not None and version != head.version:
        weights, entry = _older(bus, names, version, head.version)
    path = Path(weights["uri"])
    if files and not path.is_dir():
        raise PolicyError(
            f"the files of version {entry['version']} are gone ({path}): [learner] keep says how many stay"
        )
    return Committed(settings.policy.name, entry["version"], path, weights["digest"], entry["hash"].hex())


def _is(kind: str, version: int, record: Record) -> bool:
    return bool(codec.decode_as(kind, record.value or b"")["version"] == version)


def _older(bus: Bus, names: dict[str, str], version: int, newest: int) -> tuple[WeightVersion, LedgerEntry]:
    found = []
    for topic, kind in ((names["weights"], "WeightVersion"), (names["ledger"], "LedgerEntry")):
        record = ledger.last(bus, topic, partial(_is, kind, version))
        if record is None:
            raise PolicyError(f"there is no version {version}: the newest is {newest}")
        found.append(codec.decode_as(kind, record.value or b""))
    return cast(WeightVersion, found[0]), cast(LedgerEntry, found[1])
