"""The value of a setting by the position (a seq, a ticket, a time) from which on it holds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Timeline(Generic[Value]):
    """Values of one setting by the position from which each holds."""

    def __init__(self) -> None:
        self._from: list[int] = []
        self._values: list[Value] = []

    def set(self, position: int, value: Value) -> None:
        """From `position` on; what was set for it or a later one is replaced."""
        at = bisect_left(self._from, position)
        self._from[at:], self._values[at:] = [position], [value]

    def at(self, position: int) -> Value | None:
        """The value in force, None before the first."""
        at = bisect_right(self._from, position)
        return self._values[at - 1] if at else None

    def until(self, position: int) -> int | None:
        """The first position after `position` at which another value holds."""
        at = bisect_right(self._from, position)
        return self._from[at] if at < len(self._from) else None
