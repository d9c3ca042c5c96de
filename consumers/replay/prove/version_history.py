"""What the log says of the versions of a policy: weight events, ledger entries, and the order of learning.

Invariants: the ledger's chain of hashes holds, or nothing is proven; a weight event counts only with the digest that
the ledger names; nothing is written, and no consumer group is joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from millrace.consumers.learner.version.order import LearningOrder
from millrace.infra import versions
from millrace.infra.errors import LearnerError, PolicyError, ProofError
from millrace.infra.log.history.kinds import LEDGER, RESOLUTIONS, TRAJECTORIES, WEIGHTS
from millrace.infra.log.history.ledger import entries
from millrace.infra.log.history.reader import History, left_out
from millrace.infra.log.readable import readable
from millrace.schemas.records import LedgerEntry, Resolution, WeightVersion
from millrace.trainers.errors import CheckpointError
from millrace.trainers.weights import manifest


@dataclass(frozen=True, slots=True)
class RecordedVersion:
    """A version, and what trained it."""

    weights: WeightVersion
    entry: LedgerEntry

    @property
    def number(self) -> int:
        return self.entry["version"]

    @property
    def world(self) -> int:
        """Ranks that trained it."""
        return len(self.entry["ranks"])


class RecordedVersions:
    """The versions of a policy, by number. Raises PolicyError without one, LedgerError for a ledger that was changed,
    UnreachableError."""

    def __init__(self, history: History) -> None:
        self._history = history
        events: dict[tuple[int, str], WeightVersion] = {}
        for row in history.rows(WEIGHTS, unreadable=left_out):
            events[row.record["version"], row.record["digest"]] = row.record
        self.versions: dict[int, RecordedVersion] = {}
        # What is no entry trained nothing, and learners pass it over too; where it was one, the chain has a hole.
        for entry in entries(one for one in history.records(LEDGER) if readable(LedgerEntry, one) is not None):
            event = events.get((entry["version"], entry["digest"]))
            if event is None:
                raise ProofError(
                    f"the ledger names version {entry['version']}, and no weight event does with its digest "
                    f"{entry['digest'][:12]}: run `millrace audit`"
                )
            self.versions[entry["version"]] = RecordedVersion(event, entry)
        if 0 not in self.versions:
            raise PolicyError(
                f"policy {history.policy} does not exist: `millrace policy create --model DIR` writes version 0"
            )
        self.shards = len(history.partitions(TRAJECTORIES))
        self._starts = history.starts(TRAJECTORIES)
        self.tokens: dict[int, int] = {}
        """of all samples of a ready group, by seq"""
        self._settings: list[Resolution] = []
        for resolution in history.rows(RESOLUTIONS, unreadable=left_out):
            record = resolution.record
            if record["kind"] == "setting":
                self._settings.append(record)
            elif record["kind"] == "ready" and record["seq"] is not None:
                self.tokens[record["seq"]] = sum(record["tokens"])

    @property
    def newest(self) -> int:
        return max(self.versions)

    @property
    def first(self) -> WeightVersion:
        """The weight event of version 0, which carries what the policy began with."""
        return self.versions[0].weights

    def oldest(self, version: RecordedVersion, release: str) -> int | None:
        """The version below which tokens were masked, where the release policy in force (`release`, until a setting
        said otherwise) says so."""
        order = LearningOrder(batch=self.first["batch"] or 1, eta=self.first["eta"] or 0, release=release)
        for setting in self._settings:
            try:
                order.fold(setting)
            except LearnerError:
                continue  # the learner passed it over too
        entry = version.entry
        return entry["version"] - 1 - entry["eta"] if order.masks_head(entry["seq_lo"]) else None

    def holes(self) -> set[int]:
        """Versions of whose trained samples retention has taken some."""
        return {number for number, version in self.versions.items() if self._lacks_samples(version.entry)}

    def _lacks_samples(self, entry: LedgerEntry) -> bool:
        topic = self._history.names[TRAJECTORIES]
        return any(
            place["topic"] != topic or place["offset"] < self._starts.get(place["partition"], 1 << 62)
            for group in entry["groups"]
            if group["lost"] is None
            for place in group["trajectories"]
        )

    def directories(self, root: Path) -> Mapping[int, Path]:
        """Directories of the versions whose files are there, by version."""
        directories = {number: directory_of(version.weights, root) for number, version in self.versions.items()}
        return {number: path for number, path in directories.items() if path is not None}


@contextmanager
def refusing_forgeries(entry: LedgerEntry) -> Iterator[None]:
    """Inside, whatever no learner can have written into an entry becomes a ProofError that names its version."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ProofError(
            f"the ledger entry of version {entry['version']} says what no learner writes ({type(error).__name__}): "
            "run `millrace audit`"
        ) from error


def directory_of(event: WeightVersion, root: Path) -> Path | None:
    """Where a version lies here; None where its files are gone, or are not its own."""
    path = versions.directory(event, root)
    try:
        return path if manifest.load(path).digest == event["digest"] else None
    except (CheckpointError, OSError):
        return None
