"""How far a partition is answered: the offset that a reader may commit.

Offsets of a log have holes (transaction markers, aborted records), so nothing here counts: what matters is which of
the delivered offsets still wait for their answer.

Invariants: the mark of a partition is never above an offset that was delivered and is not answered; when all that was
delivered is answered, it is one past the last of it, whatever holes lie between."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)


class Answered(Generic[P]):
    """Delivered and answered offsets of several partitions."""

    def __init__(self) -> None:
        self._waiting: dict[P, set[int]] = {}
        self._next: dict[P, int] = {}

    def deliver(self, partition: P, offset: int) -> None:
        """An event is handed to who answers it. Delivering it again makes it wait again."""
        self._waiting.setdefault(partition, set()).add(offset)
        self._next[partition] = max(self._next.get(partition, 0), offset + 1)

    def answer(self, partition: P, offset: int) -> None:
        """Its answer is safe. One that was never delivered, or belongs to a partition that was let go, changes
        nothing."""
        self._waiting.get(partition, set()).discard(offset)

    def mark(self, partition: P) -> int | None:
        """The offset to commit, None where nothing was delivered."""
        waiting = self._waiting.get(partition)
        return min(waiting) if waiting else self._next.get(partition)

    def forget(self, partitions: Iterable[P]) -> None:
        """These belong to another reader now."""
        for partition in partitions:
            self._waiting.pop(partition, None)
            self._next.pop(partition, None)
