"""Reading the topics of one policy by what a record is about.

Invariants: committed records only, nothing is kept; of the topics that policies share, only what is about this policy
or about none: tickets, and so groups and keys, are numbered per policy."""

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
        self._own = policy.encode()
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
        for record in self._read(kind, partition):
            if kind not in SHARED or record.headers.get("policy", self._own) == self._own:
                yield record

    def others(self, id: str) -> set[str]:
        """Policies whose events, captured or governed, carry an id in their headers."""
        wanted = id.encode()
        return {
            record.headers["policy"].decode("utf-8", "replace")
            for kind in ("events", "raw")
            for record in self._read(kind)
            if record.headers.get("policy", self._own) != self._own
            and wanted in (record.headers.get("id"), record.headers.get("trajectory"), record.headers.get("group"))
        }

    def _read(self, kind: str, partition: int | None = None) -> Iterator[Record]:
        for at in range(self.count(kind)) if partition is None else [partition]:
            yield from self.bus.read(self.name(kind), at)

    def rows(
        self, kind: str, partition: int | None = None, only: Callable[[Record], bool] = lambda _: True
    ) -> Iterator[Row]:
        """Decoded records; what does not decode is left out, since it is about nothing that could be named."""
        for record in self.records(kind, partition):
            if record.value is not None and only(record):
                row = self.row(record)
                if row is not None and (kind != "dead-letters" or row["policy"] in (None, self.policy)):
                    yield row

    def row(self, record: Record) -> Row | None:
        """One record decoded, None when it cannot be read."""
        try:
            value = self._resolve(record).value or b""
            name, fields = decode(value)
        except (SchemaError, ClaimError):
            return None
        return Row(record, name, fields, value)
