"""What rank 0 knows from the log: the order of learning, the frontier of what is settled, the committed digests.

Invariants: read_committed, from the start once a process, then followed; `completions` is read to a later point than
`resolutions`, so that a resolution is never folded before its completion. No record stops the learner: one that makes
no sense is named and passed over, and a ready group that cannot be read keeps its place in the order and is trained as
lost. The frontier of a partition is its lowest place that is unresolved or not consumed, else one past the highest that
was read; it never falls. Its offsets serve lag, retention and fencing: the ledger's seq_hi alone says what is trained
next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from millrace.consumers.learner.version.order import LearningOrder
from millrace.infra.errors import ClaimError, LearnerError, LedgerError
from millrace.infra.log.base import Bus, Record
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.history.follow import PartitionCursor
from millrace.infra.log.history.kinds import COMPLETIONS, LEDGER, RESOLUTIONS, WEIGHTS, deployment_of
from millrace.infra.log.history.reader import History, name_in_log
from millrace.infra.log.history.rows import Row, as_stored
from millrace.infra.log.readable import passed_over
from millrace.schemas import bounds
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import Completion, Place, Resolution, WeightVersion


@dataclass(slots=True)
class Frontier:
    """How far the trajectories of each partition are settled. A group is open from the moment seal names its places in
    `completions` until dispatch drops it, or a version that trained on it is committed. Feed completions first, up to a
    later point than resolutions."""

    _open: dict[str, list[Place]] = field(default_factory=dict)
    _closures: set[str] = field(default_factory=set)
    _seqs: dict[int, str] = field(default_factory=dict)
    _high: dict[int, int] = field(default_factory=dict)
    _floor: int = 0

    def complete(self, completion: Completion) -> None:
        """Seal sealed places of a group."""
        if completion["kind"] == "progress":
            return
        self._saw(completion["trajectories"])
        if completion["group"] not in self._closures:
            self._open[completion["group"]] = list(completion["trajectories"])

    def resolve(self, resolution: Resolution) -> None:
        """Dispatch decided about a group."""
        if resolution["kind"] == "setting":
            return
        self._saw(resolution["trajectories"])
        group, seq = resolution["group"], resolution["seq"]
        if resolution["kind"] == "ready" and seq is not None:
            if seq >= self._floor:
                self._open[group] = list(resolution["trajectories"])
                self._seqs[seq] = group
            else:
                self._close(group)
        else:
            self._close(group)

    def commit(self, seq_hi: int) -> None:
        """A version up to `seq_hi` is committed."""
        self._floor = max(self._floor, seq_hi)
        for seq in [seq for seq in self._seqs if seq < self._floor]:
            self._open.pop(self._seqs.pop(seq), None)

    def offsets(self, seq_hi: int) -> dict[int, int]:
        """Next offset per partition once everything below `seq_hi` is consumed."""
        groups = {group for seq, group in self._seqs.items() if seq < seq_hi}
        low = dict(self._high)
        for group, places in self._open.items():
            if group not in groups:
                for place in places:
                    low[place["partition"]] = min(low[place["partition"]], place["offset"])
        return low

    def _close(self, group: str) -> None:
        if self._open.pop(group, None) is None:
            self._closures.add(group)

    def _saw(self, places: Sequence[Place]) -> None:
        for place in places:
            self._high[place["partition"]] = max(self._high.get(place["partition"], 0), place["offset"] + 1)


class PolicyLog:
    """Follows the policy's one-partition topics. `catch_up` reads everything that is new."""

    def __init__(self, bus: Bus, topics: Mapping[str, str], release: str, claims: ClaimStore | None = None) -> None:
        self._bus = bus
        self._topics = topics
        resolve = as_stored if claims is None else claims.resolve
        history = History(bus, *deployment_of(topics["weights"]), resolve, is_bounded=True)
        self._events = PartitionCursor(history, WEIGHTS)
        self._entries = PartitionCursor(history, LEDGER)
        self._completions = PartitionCursor(history, COMPLETIONS)
        self._resolutions = PartitionCursor(history, RESOLUTIONS, unreadable=_keep_seq)
        self._announced: dict[int, str] = {}
        """digest by version, as the first weight event of each says"""
        self._trained: dict[int, str] = {}
        """the same of the ledger, which is believed where the two differ"""
        self._modes: dict[tuple[int, str], str] = {}
        """how engines read a version, by number and digest"""
        self._first: WeightVersion | None = None
        first = self._weights()
        self.order = LearningOrder(batch=first["batch"] or 1, eta=first["eta"] or 0, release=release)
        self.frontier = Frontier()

    def catch_up(self) -> None:
        """Fold what is new in `completions` and `resolutions`."""
        end = self._bus.ends(self._topics["resolutions"])[0]
        if end <= self._resolutions.next:
            return
        for completion in self._completions.rows_on():
            if self._exist(completion.record["trajectories"], completion.raw):
                self.frontier.complete(completion.record)
        for row in self._resolutions.rows_on(end):
            resolution = self._take(row)
            if resolution is not None:
                self.frontier.resolve(resolution)

    def _take(self, row: Row[Resolution]) -> Resolution | None:
        """A resolution, taken into the order; None for one that says nothing about it."""
        resolution = row.record
        if not self._exist(resolution["trajectories"], row.raw):
            resolution = {**resolution, "trajectories": []}
        try:
            self.order.fold(resolution)
        except LearnerError as error:
            passed_over(row.raw, str(error))
            return None
        return resolution

    def _exist(self, places: Sequence[Place], record: Record) -> bool:
        """Whether places may be of trajectories of this policy."""
        topic = self._topics.get("trajectories")
        if topic is None or not places:
            return True
        count = self._bus.partitions(topic)
        is_valid = all(
            place["topic"] == topic and 0 <= place["partition"] < count and 0 <= place["offset"] <= bounds.VERSION
            for place in places
        )
        if not is_valid:
            passed_over(record, f"it names places outside {topic}")
        return is_valid

    def commit(self, seq_hi: int) -> None:
        """A version up to `seq_hi` is committed."""
        self.order.commit(seq_hi)
        self.frontier.commit(seq_hi)

    def all_digests(self, newest: int) -> Mapping[int, str]:
        """Digest by version, up to the newest committed one. A weight event that the ledger does not name changes none:
        what lies on the disk goes or stays by these."""
        self._weights()
        for row in self._entries.rows_on():
            self._trained.setdefault(row["version"], row["digest"])
        digests = {**self._announced, **self._trained}
        return {version: digest for version, digest in digests.items() if 0 <= version <= newest}

    def deltas(self, digests: Mapping[int, str]) -> set[int]:
        """Which of these versions engines read as changes to their parent."""
        return {version for version, digest in digests.items() if self._modes.get((version, digest)) == "delta"}

    def _weights(self) -> WeightVersion:
        for row in self._events.rows_on():
            event = row.record
            self._first = self._first or event
            self._announced.setdefault(event["version"], event["digest"])
            self._modes.setdefault((event["version"], event["digest"]), event["mode"])
        if self._first is None:
            raise LedgerError(
                f"{self._topics['weights']} is empty: `millrace policy create --model DIR` writes version 0"
            )
        return self._first


def _keep_seq(kind: str, record: Record, error: SchemaError | ClaimError) -> Row[Resolution] | None:
    """Name a resolution that cannot be read; what its headers say of it stands for it."""
    name_in_log(kind, record, error)
    resolution = _unread(record)
    return None if resolution is None else Row(record, "Resolution", resolution, b"", kind)


def _unread(record: Record) -> Resolution | None:
    """What the headers of a resolution that cannot be read still say: a ready group keeps its seq, so that the order
    has no hole; it names no trajectories, so it is lost."""
    seq = record.headers.get("seq", b"")
    if record.headers.get("kind") != b"ready" or not seq.isdigit() or len(seq) > len(str(bounds.VERSION)):
        return None
    return {
        "kind": "ready",
        "policy": record.headers.get("policy", b"").decode("utf-8", "replace"),
        "ticket": None,
        "seq": int(seq),
        "group": record.headers.get("group", b"").decode("utf-8", "replace"),
        "prompt_id": None,
        "solicited": False,
        "size": 0,
        "trajectories": [],
        "tokens": [],
        "rewards": [],
        "v_head": -1,
        "v_tail": -1,
        "min_version": -1,
        "deadline": -1,
        "reason": "its resolution cannot be read",
        "setting": None,
        "time": record.timestamp,
    }
