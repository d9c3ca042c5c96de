"""Which records a slot has seen before: one high-water mark for each source that numbers its records.

Invariants: a record that carries the headers `source` and `source-seq` (and, for sources that start their numbers anew,
`source-epoch`) is folded once, however often it was sent, if its source sends in order. Records without these headers,
or with ones that are no numbers or names within bounds, are never skipped. Only what its stage took moves a mark: bytes
that were refused cannot claim the numbers of a source. A source is remembered under the name that its stage may keep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from millrace.infra.stages.state import OWN, SlotState
from millrace.schemas import bounds

PREFIX = f"{OWN}source/"
_NONE = (-1, -1)


class SourceMarks:
    """The marks of one slot, kept in its state. `kept` gives the name under which a source may be remembered."""

    def __init__(self, state: SlotState, kept: Callable[[str], str]) -> None:
        self._state = state
        self._kept = kept
        self._seen: dict[str, tuple[int, int]] = {
            key.removeprefix(PREFIX): (epoch, seq) for key, (epoch, seq) in state.own(PREFIX)
        }
        self._moved: set[str] = set()

    def repeated(self, headers: Mapping[str, bytes]) -> bool:
        """Whether a record with these headers was taken before, or one that its source numbered later."""
        numbered = _numbered(headers)
        return numbered is not None and numbered[1] <= self._seen.get(self._name(numbered[0]), _NONE)

    def move(self, headers: Mapping[str, bytes]) -> None:
        """The record with these headers was taken: its number becomes its source's mark."""
        numbered = _numbered(headers)
        if numbered is not None:
            source, number = self._name(numbered[0]), numbered[1]
            self._seen[source] = number
            self._moved.add(source)

    def _name(self, source: str) -> str:
        return source if source in self._seen else self._kept(source)

    def save(self) -> None:
        """Put the marks that moved into the state, once a turn."""
        for source in sorted(self._moved):
            self._state.put(PREFIX + source, self._seen[source])
        self._moved.clear()


def _numbered(headers: Mapping[str, bytes]) -> tuple[str, tuple[int, int]] | None:
    """(source, (epoch, seq)) of a record, None for one that is not numbered."""
    source = headers.get("source")
    if source is None or len(source) > bounds.NAME_BYTES:
        return None
    try:
        epoch, seq = int(headers.get("source-epoch", b"0")), int(headers["source-seq"])
    except (KeyError, TypeError, ValueError):
        return None
    if not (0 <= epoch <= bounds.VERSION and 0 <= seq <= bounds.VERSION):
        return None
    return source.decode("utf-8", "backslashreplace"), (epoch, seq)
