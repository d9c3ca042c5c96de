"""The topics of one policy, read by what a record is about.

Invariants: committed records only, nothing is kept; of the topics that policies share, unless all of it is asked for,
only what is about this policy or about none: tickets, and so groups and keys, are numbered per policy; what does not
decode is left out, since it is about nothing that could be named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from millrace.infra.log.base import Bus, Place, Record
from millrace.infra.log.history.kinds import EVALUATIONS, EVENTS, RAW, TRAJECTORIES, WEIGHTS, Kind, R, deployment_of
from millrace.infra.log.history.reader import History, left_out
from millrace.infra.log.history.rows import Resolve, Row, as_stored
from millrace.infra.log.topics import NAME, full_name, partition_of
from millrace.schemas.records import Event, Trajectory

SAMPLE_KINDS = (TRAJECTORIES, EVALUATIONS)


def id_bytes(id: str) -> bytes:
    """An id as headers and keys hold it. One that no UTF-8 holds, which a shell can give, is that of nothing."""
    return id.encode("utf-8", "surrogatepass")


class PolicyTopics:
    """The topics of one policy; a topic that does not exist reads as empty."""

    def __init__(self, bus: Bus, namespace: str, policy: str, resolve: Resolve = as_stored) -> None:
        self.namespace, self.policy = namespace, policy
        self._history = History(bus, namespace, policy, resolve)

    def of(self, policy: str) -> PolicyTopics:
        """The topics of another policy of the same deployment."""
        return PolicyTopics(self._history.bus, self.namespace, policy, self._history.resolve)

    def policies(self) -> list[str]:
        """Every policy of the deployment that has weights, sorted."""
        names = self._history.bus.topics(full_name(self.namespace, ""))
        policies = [deployment_of(name)[1] for name in names if name.endswith(f".{WEIGHTS}")]
        return sorted(policy for policy in policies if NAME.fullmatch(policy))

    def policy_at(self, kind: str, place: Place) -> str | None:
        """The policy in whose topic of a kind, which policies do not share, a place lies; None for any other topic."""
        policy = place.topic.removeprefix(full_name(self.namespace, "")).removesuffix(f".{kind}")
        return policy if full_name(self.namespace, f"{policy}.{kind}") == place.topic else None

    def count(self, kind: str) -> int:
        """How many partitions a kind of topic has; 0 where there is none."""
        return len(self._history.partitions(kind))

    def records(self, kind: str, partition: int | None = None, *, own: bool = True) -> Iterator[Record]:
        """Records as read, of one partition or of all in turn. own: False for those of other policies too."""
        return self._history.records(kind, partition, own=own)

    def rows(
        self,
        kind: Kind[R],
        partition: int | None = None,
        only: Callable[[Record], bool] | None = None,
        *,
        own: bool = True,
    ) -> Iterator[Row[R]]:
        """Decoded records."""
        return self._history.rows(kind, partition, own=own, only=only, unreadable=left_out)

    def samples(self, group: str | None = None) -> Iterator[Row[Trajectory]]:
        """Sealed trajectories and evaluations, of a group or all."""
        for kind in SAMPLE_KINDS:
            partition = (
                partition_of(id_bytes(group), self.count(kind)) if group is not None and self.count(kind) else None
            )
            yield from (row for row in self.rows(kind, partition) if group in (None, row["group"]))

    def fetch(self, kind: Kind[R], places: Sequence[Place]) -> list[Row[R] | None]:
        """The rows at places, same order; None where nothing readable lies, or what lies there is another policy's."""
        rows = self._history.fetch(kind, places, left_out)
        return [row if row is not None and self._is_ours(row) else None for row in rows]

    def _is_ours(self, row: Row[Any]) -> bool:
        return bool(row.record.get("policy", self.policy) == self.policy)

    def row(self, record: Record) -> Row[Event] | None:
        """One raw record decoded, None when it cannot be read."""
        return self._history.row(RAW, record, left_out)

    def other_policies(self, id: str) -> set[str]:
        """Policies whose events, captured or governed, carry an id in their headers."""
        value, policy = id_bytes(id), self.policy.encode()
        return {
            record.headers["policy"].decode("utf-8", "replace")
            for kind in (EVENTS, RAW)
            for record in self._history.records(kind)
            if record.headers.get("policy", policy) != policy
            and value in (record.headers.get("id"), record.headers.get("trajectory"), record.headers.get("group"))
        }
