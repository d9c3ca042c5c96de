"""What led to a version, a trajectory or a task, and what came of it: chains of weight events, ledger and trajectories
over every policy, since a branch begins at a version of another one and is trained on what that one sampled.

Invariants: a version is a policy and a number; parents are what weight events say, `parent_policy` included; what a
version trained on is what its ledger entry names, and nothing else, in whichever policy's topic it lies; a token's
version is the one in its sealed lineage, of the policy that the trajectory was sampled from; what is not in the log any
more is counted, never left out in silence."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from millrace.consumers.tell.subject import EpisodeIds
from millrace.consumers.tell.topics import PolicyTopics
from millrace.infra.log.base import Place
from millrace.infra.log.history.kinds import EVENTS, GRANTS, LEDGER, RESOLUTIONS, TRAJECTORIES, WEIGHTS
from millrace.infra.log.history.rows import Row, place_of
from millrace.schemas.arrays import unpack
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import Event, LedgerEntry, ModelCall, TrainedGroup, Trajectory, WeightVersion


@dataclass(frozen=True, slots=True, order=True)
class FamilyVersion:
    """A version of a policy."""

    policy: str
    version: int


@dataclass(slots=True)
class PolicyVersions:
    """The versions of a policy."""

    weights: dict[int, Row[WeightVersion]] = field(default_factory=dict)
    ledger: dict[int, Row[LedgerEntry]] = field(default_factory=dict)

    @classmethod
    def read(cls, topics: PolicyTopics) -> PolicyVersions:
        """Read them."""
        return cls(
            {row["version"]: row for row in topics.rows(WEIGHTS)},
            {row["version"]: row for row in topics.rows(LEDGER)},
        )


class Family:
    """The versions of every policy of a deployment. `policy` is the one that is asked about."""

    def __init__(self, topics: PolicyTopics) -> None:
        self.policy = topics.policy
        names = dict.fromkeys([topics.policy, *topics.policies()])
        self.records = {name: PolicyVersions.read(topics.of(name)) for name in names}
        self._born: dict[FamilyVersion, list[FamilyVersion]] = defaultdict(list)
        for policy, records in self.records.items():
            for number in sorted(records.weights):
                child = FamilyVersion(policy, number)
                if (parent := self.parent(child)) is not None:
                    self._born[parent].append(child)

    @property
    def policy_versions(self) -> PolicyVersions:
        """Those of the policy that is asked about."""
        return self.records[self.policy]

    def parent(self, of: FamilyVersion) -> FamilyVersion | None:
        """The version that one was trained from, or a branch begins at; None before the first, and where the log does
        not say."""
        records = self.records.get(of.policy)
        event = records.weights.get(of.version) if records is not None else None
        if event is None or event["parent"] is None:
            return None
        return FamilyVersion(event["parent_policy"] or of.policy, event["parent"])

    def parents(self, of: FamilyVersion) -> tuple[FamilyVersion, ...]:
        """The versions before one, the nearest first."""
        out: dict[FamilyVersion, None] = {}
        at = self.parent(of)
        while at is not None and at != of and at not in out:
            out[at] = None
            at = self.parent(at)
        return tuple(out)

    def children(self, of: FamilyVersion) -> tuple[FamilyVersion, ...]:
        """The versions that were trained from one or begin at it."""
        return tuple(self._born.get(of, ()))

    def descendants(self, of: Sequence[FamilyVersion]) -> tuple[FamilyVersion, ...]:
        """Every version that descends from one of these."""
        out: set[FamilyVersion] = set()
        ahead = list(of)
        while ahead:
            children = [child for child in self.children(ahead.pop()) if child not in out]
            out.update(children)
            ahead += children
        return self.sort(out)

    def sort(self, versions: Iterable[FamilyVersion]) -> tuple[FamilyVersion, ...]:
        """By policy and number."""
        return tuple(sorted(versions, key=lambda one: (one.policy != self.policy, one)))

    def versions_by_place(self) -> dict[Place, tuple[FamilyVersion, ...]]:
        """The versions, of any policy, that trained on the trajectory at each place."""
        out: dict[Place, dict[FamilyVersion, None]] = defaultdict(dict)
        for policy, records in self.records.items():
            for number, entry in sorted(records.ledger.items()):
                for group in entry["groups"]:
                    for place in group["trajectories"] if group["lost"] is None else ():
                        out[place_of(place)][FamilyVersion(policy, number)] = None
        return {place: tuple(versions) for place, versions in out.items()}


CHUNK = 256
"""trajectories fetched at once"""


@dataclass(frozen=True, slots=True)
class LineageMember:
    """One trajectory in a lineage. policy: the one that it was sampled from; sampled: trainable tokens by its version;
    trained: the versions that trained on it, of this policy and of branches."""

    id: str
    policy: str
    group: str
    tenant: str
    task: str
    split: str
    reward: float | None
    sampled: dict[int, int]
    engines: tuple[str, ...]
    trained: tuple[FamilyVersion, ...]


@dataclass(frozen=True, slots=True)
class LineageGroup:
    """One trained group. seq: its place in the order of learning, None for what a branch took; gone: how many of its
    samples cannot be read any more."""

    seq: int | None
    ticket: int | None
    id: str
    lost: str | None
    members: tuple[LineageMember, ...]
    gone: int


@dataclass(frozen=True, slots=True)
class ReachCount:
    """How many groups from around a version trained another one."""

    policy: str
    version: int
    groups: int


@dataclass(frozen=True, slots=True)
class VersionLineage:
    """Backward: its ancestors, the nearest first, and what the version trained on. Forward: its children, and which
    versions trained on groups that it may have sampled (their oldest and newest versions are on either side of it)."""

    policy: str
    version: int
    digest: str
    parents: tuple[FamilyVersion, ...]
    groups: tuple[LineageGroup, ...]
    children: tuple[FamilyVersion, ...]
    reached: tuple[ReachCount, ...]
    waiting: int
    """such groups that trained nothing yet"""

    @property
    def members(self) -> list[LineageMember]:
        """Every trajectory that it trained on."""
        return [member for group in self.groups for member in group.members]


@dataclass(frozen=True, slots=True)
class TrajectoryLineage:
    """Backward: which versions and engines sampled it. Forward: which versions trained on it, and what came of them."""

    member: LineageMember
    parents: tuple[FamilyVersion, ...]
    """of the version that sampled its newest token"""
    children: tuple[FamilyVersion, ...]
    """versions that descend from those that trained on it"""


@dataclass(frozen=True, slots=True)
class TaskLineage:
    """The trajectories of a task, the versions that answered it and those that trained on the answers."""

    task: str
    tickets: tuple[int, ...]
    members: tuple[LineageMember, ...]
    unfinished: dict[str, int]
    """resolutions of its tickets that are not ready, by kind"""


def of_version(topics: PolicyTopics, version: int) -> VersionLineage | None:
    """The lineage of a version, None where no topic knows it."""
    family = Family(topics)
    entry, event = family.policy_versions.ledger.get(version), family.policy_versions.weights.get(version)
    if entry is not None:
        digest = entry["digest"]
    elif event is not None:
        digest = event["digest"]
    else:
        return None
    subject = FamilyVersion(topics.policy, version)
    groups = tuple(_group(topics, group, subject) for group in (entry["groups"] if entry is not None else ()))
    reach, waiting = _reach(topics, family, version)
    parents, children = family.parents(subject), family.children(subject)
    return VersionLineage(topics.policy, version, digest, parents, groups, children, reach, waiting)


def _group(topics: PolicyTopics, group: TrainedGroup, into: FamilyVersion) -> LineageGroup:
    """A group of the ledger entry of a version, with what can be read of it."""
    places = [place_of(place) for place in group["trajectories"]]
    rows = _fetch(topics, places)
    members = tuple(_members(topics, rows, dict.fromkeys(places, (into,))))
    seq = group["seq"] if group["seq"] >= 0 else None
    return LineageGroup(seq, group["ticket"], group["group"], group["lost"], members, len(places) - len(members))


def _fetch(topics: PolicyTopics, places: Sequence[Place]) -> list[Row[Trajectory]]:
    """The trajectories at places, in whichever policy's topic, without those that are gone."""
    by_policy: dict[str, list[Place]] = defaultdict(list)
    for place in places:
        if (policy := topics.policy_at(TRAJECTORIES, place)) is not None:
            by_policy[policy].append(place)
    by_place = {
        row.place: row
        for policy, some in by_policy.items()
        for row in topics.of(policy).fetch(TRAJECTORIES, some)
        if row is not None
    }
    return [by_place[place] for place in places if place in by_place]


def _reach(topics: PolicyTopics, family: Family, version: int) -> tuple[tuple[ReachCount, ...], int]:
    """What the groups from around a version trained, and how many of them trained nothing."""
    by_seq, by_place = _into(family)
    counts: Counter[FamilyVersion] = Counter()
    waiting = 0
    for row in topics.rows(RESOLUTIONS):
        if row["kind"] == "ready" and 0 <= row["v_head"] <= version <= row["v_tail"]:
            into = by_seq.get(row["seq"]) if row["seq"] is not None else None
            waiting += into is None
            counts.update([into] if into is not None else [])
            counts.update({one for place in row.places() for one in by_place.get(place, ())})
    return tuple(ReachCount(one.policy, one.version, counts[one]) for one in family.sort(counts)), waiting


def _into(family: Family) -> tuple[dict[int, FamilyVersion], dict[Place, set[FamilyVersion]]]:
    """The version that each group of the order of learning trained, and those of branches by the places that they took:
    a group's id is its tenant's choice, so it names none."""
    by_seq: dict[int, FamilyVersion] = {}
    by_place: dict[Place, set[FamilyVersion]] = defaultdict(set)
    for policy, records in family.records.items():
        for number, entry in records.ledger.items():
            for group in entry["groups"]:
                if policy == family.policy and group["seq"] >= 0:
                    by_seq[group["seq"]] = FamilyVersion(policy, number)
                    continue
                for place in group["trajectories"]:
                    by_place[place_of(place)].add(FamilyVersion(policy, number))
    return by_seq, by_place


def of_trajectory(topics: PolicyTopics, episode: EpisodeIds) -> TrajectoryLineage | None:
    """The lineage of a sealed trajectory, None where it is not sealed."""
    row = next((row for row in topics.samples() if (row["tenant"], row["id"]) == (episode.tenant, episode.id)), None)
    if row is None:
        return None
    family = Family(topics)
    (member,) = _members(topics, [row], family.versions_by_place())
    newest = max(member.sampled, default=None)
    parents = family.parents(FamilyVersion(member.policy, newest)) if newest is not None else ()
    return TrajectoryLineage(member, parents, family.descendants(member.trained))


def of_task(topics: PolicyTopics, task: str) -> TaskLineage | None:
    """The lineage of a task by its id, None where no topic knows it."""
    tickets = {row["ticket"] for row in topics.rows(GRANTS) if row["prompt_id"] == task}
    family = Family(topics)
    versions = family.versions_by_place()
    answers = (row for row in topics.samples() if row["task_id"] == task or row["ticket"] in tickets)
    members: list[LineageMember] = []
    while rows := list(islice(answers, CHUNK)):
        members += _members(topics, rows, versions)
    if not tickets and not members:
        return None
    kinds = ("ready", "setting")
    ends = [r for r in topics.rows(RESOLUTIONS) if r["ticket"] in tickets and r["kind"] not in kinds]
    counts = dict(sorted(Counter(str(row["kind"]) for row in ends).items()))
    return TaskLineage(task, tuple(sorted(tickets)), tuple(members), counts)


def _members(
    topics: PolicyTopics, rows: Sequence[Row[Trajectory]], versions: Mapping[Place, tuple[FamilyVersion, ...]]
) -> Iterator[LineageMember]:
    """Sealed trajectories with the engines of their calls, which are fetched together."""
    by_policy: dict[str, list[Place]] = defaultdict(list)
    for row in rows:
        by_policy[row["policy"]] += row.places("events")
    calls = {policy: iter(topics.of(policy).fetch(EVENTS, places)) for policy, places in by_policy.items()}
    for row in rows:
        events = [next(calls[row["policy"]]) for _ in row["events"]]
        yield LineageMember(
            row["id"],
            row["policy"],
            row["group"],
            row["tenant"],
            row["task_id"],
            row["split"],
            row["reward"],
            _sampling(row),
            tuple(sorted({engine for call in events if call is not None for engine in _engine(call)})),
            versions.get(row.place, ()),
        )


def _sampling(row: Row[Trajectory]) -> dict[int, int]:
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


def totals(members: Iterable[LineageMember]) -> dict[str, Any]:
    """What some trajectories have together, counted: tasks, tenants, engines, sampling and trained versions."""
    out: dict[str, Counter[Any]] = {name: Counter() for name in ("tasks", "tenants", "engines", "sampled", "trained")}
    for member in members:
        out["tasks"][member.task] += 1
        out["tenants"][member.tenant] += 1
        out["engines"].update(member.engines)
        out["sampled"].update({FamilyVersion(member.policy, number): many for number, many in member.sampled.items()})
        out["trained"].update(member.trained)
    return {name: dict(sorted(counts.items())) for name, counts in out.items()}
