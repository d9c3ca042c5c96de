"""Which session gave which reply, so that feedback may name the reply alone.

Invariants: a reply's id is looked up within its tenant only; one that several sessions of a tenant gave, as an
upstream's may be, names none of them; the newest `MOST_REPLIES` are known, and a restart learns those of live
sessions, and of ended ones that the capture log still holds, from the log."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

MOST_REPLIES = 100_000
"""replies that are remembered, about 20 MB of them"""


class SeveralReplies(Exception):
    """More than one session gave a reply of this id."""


class Replies:
    """Reply ids of all sessions of one gateway."""

    def __init__(self, most_replies: int = MOST_REPLIES) -> None:
        self._kept = most_replies
        self._sessions: OrderedDict[bytes, str | None] = OrderedDict()

    def add(self, tenant: str, response: str, session: str) -> None:
        """A session gave a reply; once more for each choice of it."""
        key = _key(tenant, response)
        owner = self._sessions.get(key, session)
        self._sessions[key] = session if owner == session else None
        self._sessions.move_to_end(key)
        while len(self._sessions) > self._kept:
            self._sessions.popitem(last=False)

    def copy(self) -> list[tuple[bytes, str | None]]:
        """All of them, the oldest first."""
        return list(self._sessions.items())

    def restore(self, replies: Iterable[tuple[bytes, str | None]]) -> None:
        """Know what `copy` gave, and nothing else."""
        self._sessions = OrderedDict(replies)

    def find(self, tenant: str, response: str) -> str | None:
        """The id of the session that gave a reply, None where none is known. Raises SeveralReplies."""
        key = _key(tenant, response)
        session = self._sessions.get(key)
        if session is None and key in self._sessions:
            raise SeveralReplies
        return session


def _key(tenant: str, response: str) -> bytes:
    text = f"{len(tenant)} {tenant}{response}"
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
