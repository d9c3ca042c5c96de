"""What the calls of one session have said already, so that a record need not say it again.

Invariants: a base is an event of the same trajectory that is in the capture log, so whoever reads the log in its order
has read it before; of two requests of which one says all that the other says, only that one is remembered; memory is
some bytes an item of the last conversations, never their text."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from millrace.schemas.requests import LEAST, Digests, RequestOutline, in_common, shortened

MOST = 8
"""conversations of one session that are gone on with"""


class StoredRequest(NamedTuple):
    """A request as a record holds it; see `ModelCall`."""

    request: bytes
    base: str | None
    kept: dict[str, int]


class RequestTrail:
    """The requests of one session that later ones may go on from, by their events, the newest last."""

    def __init__(self) -> None:
        self.known: OrderedDict[str, Digests] = OrderedDict()
        """what each event's request says, as digests"""

    def stored(self, body: bytes, outline: RequestOutline | None) -> StoredRequest:
        """What has to be stored of a request: what the log does not say yet, where that is worth its while."""
        if outline is not None and self.known:
            found = ((*in_common(outline, known), event) for event, known in self.known.items())
            kept, saved, base = max(found, key=lambda one: one[1])
            if saved >= LEAST and (request := shortened(outline, kept)) is not None:
                return StoredRequest(request, base, kept)
        return StoredRequest(body, None, {})

    def recorded(self, event: str, outline: RequestOutline | None) -> None:
        """The event of a call is in the log."""
        if outline is None or any(_says(known, outline.digests) for known in self.known.values()):
            return
        for other in [other for other, known in self.known.items() if _says(outline.digests, known)]:
            del self.known[other]
        self.known[event] = outline.digests
        if len(self.known) > MOST:
            self.known.popitem(last=False)


def _says(one: Digests, other: Digests) -> bool:
    """Whether a request says all that another one says."""
    return all(_begins(one.get(key), value) for key, value in other.items())


def _begins(value: bytes | tuple[bytes, ...] | None, part: bytes | tuple[bytes, ...]) -> bool:
    if isinstance(value, tuple) and isinstance(part, tuple):
        return value[: len(part)] == part
    return value == part
