"""Which rules of governance decided over which slot of `events`, and when.

Each refine process brings the rules of its own settings, and its slots are governed by them. A change takes effect slot
by slot as processes are restarted; two that go on side by side were started with different settings."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations


class RulesBySlot:
    """Rules are known by their digest (`Governance.policy_version`), times are log times."""

    def __init__(self) -> None:
        self._spans: dict[tuple[int, str], tuple[int, int]] = {}
        self._newest: dict[int, str] = {}

    def see(self, slot: int, rules: str, time: int) -> None:
        """A slot's next event was decided by these rules at this time."""
        first, _ = self._spans.get((slot, rules), (time, time))
        self._spans[slot, rules] = (first, time)
        self._newest[slot] = rules

    def clashes(self) -> Iterator[tuple[int, int]]:
        """Pairs of slots whose newest rules differ and were in force at the same time."""
        for (one, mine), (other, theirs) in combinations(sorted(self._newest.items()), 2):
            (my_first, my_last), (their_first, their_last) = self._spans[one, mine], self._spans[other, theirs]
            if mine != theirs and my_first < their_last and their_first < my_last:
                yield one, other
