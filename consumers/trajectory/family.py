"""Which version descends from which, over every policy of a deployment: a branch begins at a version of another policy
and is trained on what that one sampled.

Invariants: a version is a policy and a number; parents are what weight events say, `parent_policy` included; places are
told apart by their topic, which is their policy's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from millrace.consumers.why.read import PolicyTopics
from millrace.infra.log.base import Place
from millrace.infra.log.history.kinds import LEDGER, WEIGHTS
from millrace.infra.log.history.rows import Row, place_of
from millrace.schemas.records import LedgerEntry, WeightVersion


@dataclass(frozen=True, slots=True, order=True)
class FamilyVersion:
    """A version of a policy."""

    policy: str
    version: int


@dataclass(slots=True)
class PolicyRecords:
    """The versions of a policy."""

    weights: dict[int, Row[WeightVersion]] = field(default_factory=dict)
    ledger: dict[int, Row[LedgerEntry]] = field(default_factory=dict)

    @classmethod
    def read(cls, topics: PolicyTopics) -> PolicyRecords:
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
        self.records = {name: PolicyRecords.read(topics.of(name)) for name in names}
        self._born: dict[FamilyVersion, list[FamilyVersion]] = defaultdict(list)
        for policy, records in self.records.items():
            for number in sorted(records.weights):
                child = FamilyVersion(policy, number)
                if (parent := self.parent(child)) is not None:
                    self._born[parent].append(child)

    @property
    def own(self) -> PolicyRecords:
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
        found: set[FamilyVersion] = set()
        ahead = list(of)
        while ahead:
            new = [child for child in self.children(ahead.pop()) if child not in found]
            found.update(new)
            ahead += new
        return self.ordered(found)

    def ordered(self, versions: Iterable[FamilyVersion]) -> tuple[FamilyVersion, ...]:
        """By policy and number."""
        return tuple(sorted(versions, key=lambda one: (one.policy != self.policy, one)))

    def trained(self) -> dict[Place, tuple[FamilyVersion, ...]]:
        """The versions, of any policy, that trained on the trajectory at each place."""
        found: dict[Place, dict[FamilyVersion, None]] = defaultdict(dict)
        for policy, records in self.records.items():
            for number, entry in sorted(records.ledger.items()):
                for group in entry["groups"]:
                    for place in group["trajectories"] if group["lost"] is None else ():
                        found[place_of(place)][FamilyVersion(policy, number)] = None
        return {place: tuple(versions) for place, versions in found.items()}
