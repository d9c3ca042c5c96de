"""Reading the topics of one policy by what a record is about. Invariant: committed records only, nothing is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from consumers.audit.rows import Row
from infra.bus.base import Bus, Record
from infra.errors import ClaimError, TopicError
from infra.topics import full_name
from schemas.codec import decode
from schemas.errors import SchemaError

SHARED = frozenset({"raw", "events", "dead-letters", "decisions", "workers"})
Resolve = Callable[[Record], Record]


class Topics:
    """The topics of one policy; a topic that does not exist reads as empty."""

    def __init__(self, bus: Bus, namespace: str, policy: str, resolve: Resolve) -> None:
        self.bus = bus
        self.policy = policy
        self._namespace = namespace
        self._resolve = resolve

    def name(self, kind: str) -> str:
        """The full name of a kind of topic."""
        return full_name(self._namespace, kind if kind in SHARED else f"{self.policy}.{kind}")

    def count(self, kind: str) -> int:
        """How many partitions a kind of topic has; 0 where there is none."""
        try:
            return self.bus.partitions(self.name(kind))
        except TopicError:
            return 0

    def records(self, kind: str, partition: int | None = None) -> Iterator[Record]:
        """Records as read, of one partition or of all in turn."""
        for at in range(self.count(kind)) if partition is None else [partition]:
            yield from self.bus.read(self.name(kind), at)

    def rows(
        self, kind: str, partition: int | None = None, only: Callable[[Record], bool] = lambda _: True
    ) -> Iterator[Row]:
        """Decoded records; what does not decode is left out, since it is about nothing that could be named."""
        for record in self.records(kind, partition):
            if record.value is not None and only(record):
                row = self.row(record)
                if row is not None:
                    yield row

    def row(self, record: Record) -> Row | None:
        """One record decoded, None when it cannot be read."""
        try:
            value = self._resolve(record).value or b""
            name, fields = decode(value)
        except (SchemaError, ClaimError):
            return None
        return Row(record, name, fields, value)
