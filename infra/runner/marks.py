"""Which records a slot has seen before: one high-water mark for each source that numbers its records.

Invariant: a record that carries the headers `source` and `source-seq` (and, for sources that start their numbers anew,
`source-epoch`) is folded once, however often it was sent, if its source sends in order. Records without these headers,
or with ones that are no numbers, are never skipped.
"""

from __future__ import annotations

from collections.abc import Mapping

from infra.runner.state import OWN, State

PREFIX = f"{OWN}source/"


class Marks:
    """The marks of one slot, kept in its state."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._seen: dict[str, tuple[int, int]] = {
            key.removeprefix(PREFIX): (epoch, seq) for key, (epoch, seq) in state.own(PREFIX)
        }
        self._moved: set[str] = set()

    def repeated(self, headers: Mapping[str, bytes]) -> bool:
        """Whether a record with these headers was seen before; else its number becomes the mark."""
        if "source" not in headers or "source-seq" not in headers:
            return False
        try:
            number = (int(headers.get("source-epoch", b"0")), int(headers["source-seq"]))
        except ValueError:
            return False
        source = headers["source"].decode("utf-8", "backslashreplace")
        if source in self._seen and number <= self._seen[source]:
            return True
        self._seen[source] = number
        self._moved.add(source)
        return False

    def save(self) -> None:
        """Put the marks that moved into the state, once a turn."""
        for source in sorted(self._moved):
            self._state.put(PREFIX + source, self._seen[source])
        self._moved.clear()
