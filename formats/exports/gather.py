"""Samples out of the log, group by group.

Invariants: all that is read lies before ends that are taken once, so two passes see the same; what is held in memory is
the groups that are open and one chunk, whatever the history's length; every trajectory that is read is counted once, as
left out by a rule, as refused with a reason, or as given to the layout."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any, NamedTuple

from millrace.dialects.dialogue import Unsayable
from millrace.formats.clearance import TenantRules
from millrace.formats.exports.select import Selection, VersionRange
from millrace.formats.sample import ExportedSample
from millrace.infra.errors import ClaimError, StorageError
from millrace.infra.log.base import Place, Record
from millrace.infra.log.history.gaps import missing_parts
from millrace.infra.log.history.kinds import EVALUATIONS, EVENTS, LEDGER, TRAJECTORIES, Kind
from millrace.infra.log.history.reader import History, Stretch
from millrace.infra.log.history.rows import Row
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import Event, LedgerEntry, Trajectory

CHUNK = 32
"""groups whose calls are fetched at once"""
PLACES = 512
"""trajectories that are fetched at once where the ledger names them"""

Watch = Callable[[int, int], None]
"""hears how many records are read, and of how many"""


class ExportRefusal(NamedTuple):
    """A trajectory that was wanted and is not exported."""

    trajectory: str
    reason: str
    detail: str
    place: Place


@dataclass(slots=True)
class ExportTally:
    """What became of every trajectory that was read."""

    read: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """by the rule of the selection"""
    refusals: Counter[str] = field(default_factory=Counter)
    """by reason"""
    exports: int = 0


Refuse = Callable[[ExportRefusal], None]


class Gatherer:
    """Reads the samples of one policy. owner: the tenant that the policy belongs to; rules: of tenants, today."""

    def __init__(
        self,
        history: History,
        selection: Selection,
        owner: str,
        rules: TenantRules,
        tally: ExportTally,
        refuse: Refuse,
    ) -> None:
        self._history = history
        self._selection = selection
        self._owner = owner
        self._rules = rules
        self._tally = tally
        self._refuse = refuse
        entries = (row.record for row in history.rows(LEDGER))
        self._trained = TrainingVersions(history.names[TRAJECTORIES], entries)
        kinds = [*([TRAJECTORIES] if selection.train else []), *([EVALUATIONS] if selection.evaluation else [])]
        self._ends = {kind: history.ends(kind) for kind in kinds}
        self.gone = missing_parts(history, *kinds)
        """ranges of the selected topics that nobody has any more"""
        self._starts = {kind: history.starts(kind) for kind in kinds}
        self._total = sum(
            self._size(kind, partition, end) for kind, ends in self._ends.items() for partition, end in ends.items()
        )

    def groups(self, watch: Watch = lambda count, total: None) -> Iterator[list[ExportedSample]]:
        """The samples of every group that has any, in log order of the groups' ends. Raises StorageError where claimed
        bytes cannot be had now."""
        count = 0
        for kind, ends in self._ends.items():
            for partition, end in sorted(ends.items()):
                for together in _chunks(self._groups(kind, partition, end)):
                    count += sum(len(group.rows) + group.unread for group in together)
                    yield from self._samples([group.rows for group in together])
                    watch(count, self._total)

    # -- reading

    def _groups(self, kind: Kind[Trajectory], partition: int, end: int) -> Iterator[_Group]:
        """Every group of a partition once all its records are read; which are counted first, by their key."""
        waiting = Counter(record.key for record in self._records(kind, partition, end))
        groups: defaultdict[bytes, _Group] = defaultdict(_Group)
        for record in self._records(kind, partition, end):
            group = groups[record.key]
            row = self._history.row(kind, record, self._unreadable)
            if row is None:
                group.unread += 1
            else:
                group.rows.append(row)
            waiting[record.key] -= 1
            if waiting[record.key] <= 0:
                yield groups.pop(record.key)

    def _records(self, kind: Kind[Trajectory], partition: int, end: int) -> Iterator[Record]:
        """The records of a partition that may be wanted: where versions are named, those that the ledger places."""
        offsets = self._offsets(kind, partition, end)
        if offsets is None:
            yield from self._history.records(kind, partition, Stretch(end=end))
            return
        topic = self._history.names[kind]
        for at in range(0, len(offsets), PLACES):
            places = [Place(topic, partition, offset) for offset in offsets[at : at + PLACES]]
            yield from (record for record in self._history.bus.fetch(places) if record is not None)

    def _offsets(self, kind: Kind[Trajectory], partition: int, end: int) -> list[int] | None:
        """Where the ledger places what is wanted of a partition, None where any record may be wanted."""
        if self._selection.trained is None:
            return None
        offsets = self._trained.offsets(self._history.names[kind], partition, self._selection.trained)
        return [offset for offset in offsets if 0 <= offset < end]

    def _size(self, kind: Kind[Trajectory], partition: int, end: int) -> int:
        offsets = self._offsets(kind, partition, end)
        return end - self._starts[kind].get(partition, 0) if offsets is None else len(offsets)

    def _unreadable(self, kind: str, record: Record, error: SchemaError | ClaimError) -> Row[Any] | None:
        if isinstance(error, StorageError):
            raise error
        self._tally.read += 1
        self._turn_down("", "unreadable", type(error).__name__, record.place)
        return None

    # -- choosing

    def _samples(self, groups: Sequence[Sequence[Row[Trajectory]]]) -> Iterator[list[ExportedSample]]:
        rows_of_groups = [[row for row in rows if self._is_wanted(row)] for rows in groups]
        places = [place for rows in rows_of_groups for row in rows for place in row.places("events")]
        calls = iter(self._history.fetch(EVENTS, places) if places else [])
        for rows in rows_of_groups:
            by_tenant: dict[str, list[ExportedSample]] = {}
            for row in rows:
                events = [next(calls) for _ in row["events"]]
                if (sample := self._sample(row, events)) is not None:
                    by_tenant.setdefault(row["tenant"], []).append(sample)
            for samples in by_tenant.values():  # groups of two tenants may have one name
                yield self._finish_group(samples)

    def _is_wanted(self, row: Row[Trajectory]) -> bool:
        self._tally.read += 1
        rule = self._selection.leaves_out(row.record, self._trained.version(row.place))
        if rule is not None:
            self._tally.left_out[rule] += 1
        return rule is None

    def _sample(self, row: Row[Trajectory], calls: Sequence[Row[Event] | None]) -> ExportedSample | None:
        try:
            if (why := self._rules(row["tenant"], row["split"])) is not None:
                raise Unsayable("ineligible", why)
            there = [call for call in calls if call is not None]
            if len(there) < len(calls):
                raise Unsayable(
                    "events_gone",
                    "its calls are neither in the topic nor in the archive, so nothing says what may leave",
                )
            return ExportedSample(row, there, self._trained.version(row.place), self._owner)
        except Unsayable as error:
            self._turn_down(row["id"], error.code, str(error), row.place)
        except SchemaError as error:
            self._turn_down(row["id"], "unreadable", type(error).__name__, row.place)
        return None

    def _finish_group(self, samples: list[ExportedSample]) -> list[ExportedSample]:
        """The samples of one group, with its mean reward; only the best where the selection says so."""
        samples.sort(key=lambda sample: sample.record["sample"])
        rewards = [reward for sample in samples if (reward := sample.record["reward"]) is not None and reward == reward]
        for sample in samples:
            sample.group_reward = fmean(rewards) if rewards else sample.group_reward
        if not self._selection.best or not rewards:
            return samples
        best = next(sample for sample in samples if sample.record["reward"] == max(rewards))
        self._tally.left_out["best_of_group"] += len(samples) - 1
        return [best]

    def _turn_down(self, trajectory: str, reason: str, detail: str, place: Place) -> None:
        self._tally.refusals[reason] += 1
        self._refuse(ExportRefusal(trajectory, reason, detail, place))


class _Group:
    """The records of one key that are read."""

    def __init__(self) -> None:
        self.rows: list[Row[Trajectory]] = []
        self.unread = 0


def _chunks(groups: Iterable[_Group]) -> Iterator[list[_Group]]:
    source = iter(groups)
    while chunk := list(islice(source, CHUNK)):
        yield chunk


class TrainingVersions:
    """Which version trained a trajectory, by its place; of lost groups none did. Sixteen bytes a trained trajectory,
    however long the history is."""

    def __init__(self, topic: str, entries: Iterable[LedgerEntry]) -> None:
        trainings: dict[int, list[tuple[int, int]]] = {}
        for entry in entries:
            for group in entry["groups"]:
                for place in group["trajectories"]:
                    if group["lost"] is None and place["topic"] == topic:
                        trainings.setdefault(place["partition"], []).append((place["offset"], entry["version"]))
        self._topic = topic
        self._offsets: dict[int, array[int]] = {}
        self._versions: dict[int, array[int]] = {}
        for partition, pairs in trainings.items():
            pairs.sort()
            self._offsets[partition] = array("q", (offset for offset, _ in pairs))
            self._versions[partition] = array("q", (version for _, version in pairs))

    def offsets(self, topic: str, partition: int, versions: VersionRange) -> list[int]:
        """Where the trajectories of a topic's partition lie that these versions trained on, ascending."""
        if topic != self._topic or partition not in self._offsets:
            return []
        pairs = zip(self._offsets[partition], self._versions[partition], strict=True)
        return list(dict.fromkeys(offset for offset, version in pairs if versions.holds(version)))

    def version(self, place: Place) -> int | None:
        """The version that trained on the trajectory at a place, None when none did."""
        offsets = self._offsets.get(place.partition)
        if offsets is None or place.topic != self._topic:
            return None
        at = bisect_left(offsets, place.offset)
        return self._versions[place.partition][at] if at < len(offsets) and offsets[at] == place.offset else None
