"""What led to a version, a trajectory or a task, and what came of it: chains of weight events, ledger and trajectories.

Invariants: what a version trained on is what its ledger entry names, and nothing else; a token's version is the one in
its sealed lineage; what is not in the log any more is counted, never left out in silence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.consumers.history.kinds import EVALUATIONS, EVENTS, GRANTS, LEDGER, RESOLUTIONS, TRAJECTORIES, WEIGHTS
from millrace.consumers.history.rows import Row, place_of
from millrace.consumers.trajectory.find import FoundTrajectory
from millrace.consumers.why.read import PolicyTopics
from millrace.infra.log.base import Place
from millrace.schemas.arrays import unpack
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import Event, LedgerEntry, ModelCall, Resolution, Trajectory, WeightVersion

CHUNK = 256
"""trajectories fetched at once"""


@dataclass(frozen=True, slots=True)
class Member:
    """One trajectory in a lineage. sampled: trainable tokens by version; trained: the version that trained on it."""

    id: str
    group: str
    tenant: str
    task: str
    split: str
    reward: float | None
    sampled: dict[int, int]
    engines: tuple[str, ...]
    trained: int | None


@dataclass(frozen=True, slots=True)
class LineageGroup:
    """One trained group. gone: how many of its samples cannot be read any more."""

    seq: int
    ticket: int | None
    id: str
    lost: str | None
    members: tuple[Member, ...]
    gone: int


@dataclass(frozen=True, slots=True)
class VersionLineage:
    """Backward: parents up to version 0, and what the version trained on. Forward: its children, and which versions
    trained on groups that it may have sampled (their oldest and newest versions are on either side of it)."""

    policy: str
    version: int
    digest: str
    parents: tuple[int, ...]
    groups: tuple[LineageGroup, ...]
    children: tuple[int, ...]
    reached: dict[int, int]
    """version -> groups that trained it with tokens from around this version"""
    waiting: int
    """such groups that trained nothing yet"""

    @property
    def members(self) -> list[Member]:
        """Every trajectory that it trained on."""
        return [member for group in self.groups for member in group.members]


@dataclass(frozen=True, slots=True)
class TrajectoryLineage:
    """Backward: which versions and engines sampled it. Forward: which version trained on it, and what came of that."""

    member: Member
    parents: tuple[int, ...]
    """of the version that sampled its newest token"""
    children: tuple[int, ...]
    """versions that descend from the one that trained on it"""


@dataclass(frozen=True, slots=True)
class TaskLineage:
    """The trajectories of a task, the versions that answered it and those that trained on the answers."""

    task: str
    tickets: tuple[int, ...]
    members: tuple[Member, ...]
    unfinished: dict[str, int]
    """resolutions of its tickets that are not ready, by kind"""


@dataclass(slots=True)
class PolicyRecords:
    """The small topics of a policy."""

    weights: dict[int, Row[WeightVersion]] = field(default_factory=dict)
    ledger: dict[int, Row[LedgerEntry]] = field(default_factory=dict)
    resolutions: list[Row[Resolution]] = field(default_factory=list)

    @classmethod
    def read(cls, topics: PolicyTopics) -> PolicyRecords:
        """Read them."""
        return cls(
            {row["version"]: row for row in topics.rows(WEIGHTS)},
            {row["version"]: row for row in topics.rows(LEDGER)},
            [row for row in topics.rows(RESOLUTIONS) if row["kind"] != "setting"],
        )

    def trained(self) -> dict[Place, int]:
        """The version that trained on the trajectory at each place."""
        return {
            place_of(place): version
            for version, row in self.ledger.items()
            for group in row["groups"]
            if group["lost"] is None
            for place in group["trajectories"]
        }

    def parents(self, version: int) -> tuple[int, ...]:
        """The versions before one, the nearest first."""
        out: list[int] = []
        at: int | None = version
        while at is not None and (row := self.weights.get(at)) is not None and row["parent"] not in (None, *out):
            at = row["parent"]
            assert at is not None
            out.append(at)
        return tuple(out)

    def children(self, version: int) -> tuple[int, ...]:
        """Every version that descends from one, ascending."""
        found = {version}
        for other in sorted(self.weights):
            if self.weights[other]["parent"] in found:
                found.add(other)
        return tuple(sorted(found - {version}))


def of_version(topics: PolicyTopics, policy: str, version: int) -> VersionLineage | None:
    """The lineage of a version, None where no topic knows it."""
    records = PolicyRecords.read(topics)
    entry = records.ledger.get(version)
    if entry is None and version not in records.weights:
        return None
    groups = []
    for group in entry["groups"] if entry is not None else []:
        places = [place_of(place) for place in group["trajectories"]]
        rows = [row for row in topics.fetch(TRAJECTORIES, places) if row is not None]
        made = tuple(_members(topics, rows, dict.fromkeys(places, version)))
        groups.append(
            LineageGroup(group["seq"], group["ticket"], group["group"], group["lost"], made, len(places) - len(made))
        )
    by_seq = {group["seq"]: number for number, row in records.ledger.items() for group in row["groups"]}
    reached: Counter[int] = Counter()
    waiting = 0
    for row in records.resolutions:
        if row["kind"] == "ready" and 0 <= row["v_head"] <= version <= row["v_tail"]:
            into = by_seq.get(row["seq"]) if row["seq"] is not None else None
            waiting += into is None
            if into is not None:
                reached[into] += 1
    digest = entry["digest"] if entry is not None else records.weights[version]["digest"]
    children = tuple(child for child in records.children(version) if records.weights[child]["parent"] == version)
    found = dict(sorted(reached.items()))
    return VersionLineage(policy, version, digest, records.parents(version), tuple(groups), children, found, waiting)


def of_trajectory(topics: PolicyTopics, found: FoundTrajectory) -> TrajectoryLineage | None:
    """The lineage of a sealed trajectory, None where it is not sealed."""
    records = PolicyRecords.read(topics)
    for kind in (TRAJECTORIES, EVALUATIONS):
        for row in topics.rows(kind):
            if (row["tenant"], row["id"]) == (found.tenant, found.id):
                (member,) = _members(topics, [row], records.trained())
                newest = max(member.sampled, default=None)
                parents = records.parents(newest) if newest is not None else ()
                children = records.children(member.trained) if member.trained is not None else ()
                return TrajectoryLineage(member, parents, children)
    return None


def of_task(topics: PolicyTopics, task: str) -> TaskLineage | None:
    """The lineage of a task by its id, None where no topic knows it."""
    records = PolicyRecords.read(topics)
    tickets = {row["ticket"] for row in topics.rows(GRANTS) if row["prompt_id"] == task}
    trained = records.trained()
    members: list[Member] = []
    for kind in (TRAJECTORIES, EVALUATIONS):
        wanted: list[Row[Trajectory]] = []
        for row in topics.rows(kind):
            if row["task_id"] == task or (row["ticket"] is not None and row["ticket"] in tickets):
                wanted.append(row)
            if len(wanted) >= CHUNK:
                members += _members(topics, wanted, trained)
                wanted = []
        members += _members(topics, wanted, trained)
    if not tickets and not members:
        return None
    ended = [row for row in records.resolutions if row["ticket"] in tickets and row["kind"] != "ready"]
    unfinished = dict(sorted(Counter(str(row["kind"]) for row in ended).items()))
    return TaskLineage(task, tuple(sorted(tickets)), tuple(members), unfinished)


def _members(topics: PolicyTopics, rows: Sequence[Row[Trajectory]], trained: dict[Place, int]) -> Iterator[Member]:
    """Sealed trajectories with the engines of their calls, which are fetched together."""
    calls = iter(topics.fetch(EVENTS, [place for row in rows for place in row.places("events")]))
    for row in rows:
        own = [next(calls) for _ in row["events"]]
        yield Member(
            row["id"],
            row["group"],
            row["tenant"],
            row["task_id"],
            row["split"],
            row["reward"],
            _sampled(row),
            tuple(sorted({engine for call in own if call is not None for engine in _engine(call)})),
            trained.get(row.place),
        )


def _sampled(row: Row[Trajectory]) -> dict[int, int]:
    """Trainable tokens by version."""
    out: Counter[int] = Counter()
    for lineage in row["lineages"]:
        try:
            mask, versions = unpack(lineage["mask"]), unpack(lineage["versions"])
        except SchemaError:
            continue
        many = min(len(mask), len(versions))
        out.update(versions[:many][mask[:many] != 0].tolist())
    return dict(sorted(out.items()))


def _engine(call: Row[Event]) -> Iterable[str]:
    """The engine that answered, and which start of it."""
    if call["kind"] != "model_call":
        return
    try:
        body: ModelCall = call.body
    except SchemaError:
        return
    start = f" ({body['engine_incarnation']})" if body["engine_incarnation"] else ""
    yield f"{body['engine']} {body['engine_version']}{start}"


def summed(members: Iterable[Member]) -> dict[str, Any]:
    """What some trajectories have together, counted: tasks, tenants, engines, sampling and trained versions."""
    out: dict[str, Counter[Any]] = {name: Counter() for name in ("tasks", "tenants", "engines", "sampled", "trained")}
    for member in members:
        out["tasks"][member.task] += 1
        out["tenants"][member.tenant] += 1
        out["engines"].update(member.engines)
        out["sampled"].update(member.sampled)
        if member.trained is not None:
            out["trained"][member.trained] += 1
    return {name: dict(sorted(found.items())) for name, found in out.items()}
