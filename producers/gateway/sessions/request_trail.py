"""What the calls of one session have said already, so that a record need not say it again.

Invariants: a base is an event of the same trajectory that is in the capture log, so whoever reads the log in its order
has read it before; of two requests of which one says all that the other says, only that one is remembered; memory is
some bytes an item of the last conversations, never their text."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from millrace.schemas.requests import LEAST, Digests, RequestOutline, in_common, shorten

MOST = 8
"""conversations of one session that are gone on with"""


Beginning = tuple[str, bytes]


class CompressedRequest(NamedTuple):
    """A request as a record holds it; see `ModelCall`."""

    request: bytes
    base: str | None
    overlap: dict[str, int]


class RequestTrail:
    """The requests of one session that later ones may go on from, by their events, the newest last."""

    def __init__(self) -> None:
        self.known: OrderedDict[str, Digests] = OrderedDict()
        """what each event's request says, as digests"""
        self._begin: dict[Beginning, set[str]] = {}
        """the events whose requests begin so"""

    def compress(self, body: bytes, outline: RequestOutline | None) -> CompressedRequest:
        """What has to be stored of a request: what the log does not say yet, where that is worth its while."""
        near = self._near(outline.digests) if outline is not None else []
        if outline is not None and near:
            candidates = ((*in_common(outline, self.known[event]), event) for event in near)
            overlap, saved_bytes, base = max(candidates, key=lambda one: one[1])
            if saved_bytes >= LEAST and (request := shorten(outline, overlap)) is not None:
                return CompressedRequest(request, base, overlap)
        return CompressedRequest(body, None, {})

    def add(self, event: str, outline: RequestOutline | None) -> None:
        """The event of a call is in the log."""
        if outline is None or not outline.digests:
            return
        near = self._near(outline.digests)
        if any(_says(self.known[near_event], outline.digests) for near_event in near):
            return
        for near_event in near:
            if _says(outline.digests, self.known[near_event]):
                self._forget(near_event)
        self.known[event] = outline.digests
        for beginning in _beginnings(outline.digests):
            self._begin.setdefault(beginning, set()).add(event)
        if len(self.known) > MOST:
            self._forget(next(iter(self.known)))

    def _near(self, digests: Digests) -> list[str]:
        """The events whose requests have anything in common with one of these digests, the oldest first."""
        candidates = set[str]().union(*(self._begin.get(beginning, ()) for beginning in _beginnings(digests)))
        return [event for event in self.known if event in candidates] if candidates else []

    def _forget(self, event: str) -> None:
        for beginning in _beginnings(self.known.pop(event)):
            events = self._begin[beginning]
            events.discard(event)
            if not events:
                del self._begin[beginning]


def _beginnings(digests: Digests) -> list[Beginning]:
    """A long value, or the first item of a list: where two requests have none of them in common, they have nothing."""
    return [(key, value if isinstance(value, bytes) else value[0]) for key, value in digests.items() if len(value) > 0]


def _says(one: Digests, part: Digests) -> bool:
    """Whether a request says all that another one says."""
    return all(_begins(one.get(key), value) for key, value in part.items())


def _begins(value: bytes | tuple[bytes, ...] | None, part: bytes | tuple[bytes, ...]) -> bool:
    if isinstance(value, tuple) and isinstance(part, tuple):
        return value[: len(part)] == part
    return value == part
