"""What the bus in memory keeps: logs and groups. Whoever changes one holds the bus's lock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millrace.infra.log.base import (
    Record,
)

if TYPE_CHECKING:
    from millrace.infra.log.memory.read import MemoryMember
    from millrace.infra.log.memory.write import MemoryTransactor


class PartitionLog:
    """One partition. `entries[i]` is offset `i`; None is a marker, an aborted record or a deleted one."""

    __slots__ = ("entries", "open", "start", "topic")

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.entries: list[Record | None] = []
        self.open: dict[MemoryTransactor, int] = {}
        self.start = 0

    @property
    def stable(self) -> int:
        return min(self.open.values()) if self.open else len(self.entries)


@dataclass(slots=True)
class MemoryGroup:
    topic: str
    generation: int = 0
    members: dict[str, MemoryMember] = field(default_factory=dict)
    assignment: dict[str, set[int]] = field(default_factory=dict)
    offsets: dict[int, int] = field(default_factory=dict)
    pending: dict[int, int] = field(default_factory=dict)
    """partition -> open transactions that carry an offset of it"""

    def rebalance(self, partitions: int) -> None:
        """A new generation: partitions spread evenly over the members, moving as few as possible."""
        self.generation += 1
        names = list(self.members)
        kept = {name: sorted(self.assignment.get(name, ())) for name in names}
        free = sorted(set(range(partitions)) - {p for owned in kept.values() for p in owned})
        low, extra = divmod(partitions, len(names)) if names else (0, 0)
        for name in sorted(names, key=lambda n: -len(kept[n])):
            most = low + 1 if extra > 0 else low
            extra -= 1
            free += kept[name][most:]
            kept[name] = kept[name][:most]
        for p in sorted(free):
            if names:
                kept[min(names, key=lambda n: len(kept[n]))].append(p)
        self.assignment = {name: set(owned) for name, owned in kept.items()}
