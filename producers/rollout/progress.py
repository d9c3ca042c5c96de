"""Which grants of each partition are finished, and so how far the group may commit.

Invariant: the position never passes a grant that has not finished, so whoever takes over runs it again."""

from __future__ import annotations


class GrantProgress:
    """Grants by partition, in the order they were read."""

    def __init__(self) -> None:
        self._running: dict[int, dict[int, bool]] = {}
        self._next: dict[int, int] = {}

    def began(self, partition: int, offset: int) -> None:
        """A grant was read."""
        self._running.setdefault(partition, {})[offset] = False
        self._next[partition] = offset + 1

    def finished(self, partition: int, offset: int) -> None:
        """A grant is over, whatever became of it."""
        waiting = self._running.get(partition, {})
        if offset in waiting:
            waiting[offset] = True
            while waiting and waiting[first := next(iter(waiting))]:
                del waiting[first]

    def position(self, partition: int) -> int | None:
        """Next offset to commit; None before anything was read."""
        waiting = self._running.get(partition)
        return next(iter(waiting)) if waiting else self._next.get(partition)

    def forget(self, partition: int) -> None:
        """The partition is another worker's now."""
        self._running.pop(partition, None)
        self._next.pop(partition, None)
