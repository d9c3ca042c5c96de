"""Whose conversation a call belongs to, as far as the call itself says: a name, an end user, or only what it echoes.

A call with a session's own key, or with a session's name, says it. Any other call is nameless: it goes on in an episode
where it echoes the random ids of tool calls that only this one was told, whatever became of the words around them, or
where what it echoes ends with a reply that one single conversation was given.

Invariants: only episodes that began nameless are gone on with nameless; a digest that two live episodes hold, or that a
former episode held, identifies nobody; end users are apart from each other and from callers that name none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from millrace.dialects.errors import bad_request
from millrace.dialects.rendering.base import Message
from millrace.producers.gateway.sessions.session import GatewaySession
from millrace.schemas.bounds import NAME_BYTES

MOST_FORMER = 200_000
"""replies of former nameless episodes that are remembered, so that nobody else is taken for their owner"""

Key = tuple[str, str, bytes]


class Hints(NamedTuple):
    """What a call says about itself: the name of its conversation, its end user as a digest ("" where none), and where
    the name stands ("" without one). `must_exist`: it is for a conversation that is held here, and begins none."""

    name: str | None
    subject: str
    named_by: str = ""
    must_exist: bool = False


class SessionMatch(NamedTuple):
    """The episode of a call. `proven`: the call shows that it is its own; a nameless one by an id that only this
    conversation was told. `by`: what it was found by."""

    session: GatewaySession
    proven: bool
    by: str


NAME_HEADER = "x-millrace-session"
USER = "x-millrace-user"
"""the header that names the end user"""
TRAJECTORY_HEADER = "x-millrace-trajectory"
"""the header of a reply that says which session its call is in"""
PATH = ":session"
"""where a name in the base_url stands among the headers: no client can send one of that name"""
HOLDER_ONLY = ":held"
"""among the headers of a request that is only for who holds its conversation (`millrace.producers.gateway.processes`):
no client can send one of that name"""
NAME_HEADERS = {
    NAME_HEADER: f"header:{NAME_HEADER}",
    PATH: "path",
    **{name: f"header:{name}" for name in ("x-session-id", "x-claude-code-session-id", "session-id", "thread-id")},
}
"""headers that name a conversation, ours first, and the word of the log for each"""


def hints(headers: Mapping[str, str], *users: object, name: str | None = None, field: str = "") -> Hints:
    """What the headers say, and the body's own words: for the conversation, where they name none, and for the end user.
    `field`: where the body names the conversation. Raises ApiError 400 for a name too long."""
    by = f"body:{field}" if name is not None else ""
    for header, word in NAME_HEADERS.items():
        if text := headers.get(header):
            name, by = _utf8(text), word
            break
    if name is not None and len(name.encode(errors="surrogatepass")) > NAME_BYTES:
        raise bad_request(f"{NAME_HEADER}: a name has at most {NAME_BYTES} bytes", param=NAME_HEADER)
    end_user = _utf8(headers.get(USER) or "") or next((user for user in users if isinstance(user, str) and user), "")
    subject = blake2b(end_user.encode(errors="surrogatepass"), digest_size=16).hexdigest() if end_user else ""
    return Hints(name, subject, by, HOLDER_ONLY in headers)


def _ids(message: Message) -> Iterator[str]:
    """The ids of the calls that a message makes, or answers."""
    for call in message.get("tool_calls") or ():
        if id := call.get("id"):
            yield id
    if id := message.get("tool_call_id"):
        yield id


def _utf8(value: str) -> str:
    """A header's value as bodies would say it: its bytes are UTF-8 where they can be."""
    try:
        return value if value.isascii() else value.encode("latin-1").decode()
    except UnicodeError:
        return value


class ReplyOwners:
    """Which live episode was given which reply, over all tenants."""

    def __init__(self) -> None:
        self._owners: dict[Key, list[GatewaySession]] = {}
        self._told: dict[tuple[str, str, str], GatewaySession] = {}
        """by the ids of tool calls that were minted here"""
        self._spent: OrderedDict[Key, None] = OrderedDict()

    def add_digest(self, session: GatewaySession, digest: bytes) -> None:
        """A caller was given this reply in this episode."""
        owners = self._owners.setdefault((session.tenant, session.subject, digest), [])
        if session not in owners:
            owners.append(session)
            session.digests.append(digest)

    def add_call_ids(self, session: GatewaySession, reply: Message) -> None:
        """The caller of this nameless episode was told the ids of a reply's calls, which nobody else knows."""
        for id in _ids(reply):
            self._told[session.tenant, session.subject, id] = session
            session.call_ids.append(id)

    def retire(self, session: GatewaySession) -> None:
        """The episode is over. Its caller may still come back, so its replies identify nobody else."""
        for id in session.call_ids:
            self._told.pop((session.tenant, session.subject, id), None)
        for digest in session.digests:
            key = (session.tenant, session.subject, digest)
            owners = self._owners.get(key, [])
            if session in owners:
                owners.remove(session)
            if not owners:
                self._owners.pop(key, None)
            if session.nameless:
                self._spent[key] = None
                self._spent.move_to_end(key)
        while len(self._spent) > MOST_FORMER:
            self._spent.popitem(last=False)

    def copy(self) -> list[Key]:
        """The replies of former nameless episodes, the oldest first."""
        return list(self._spent)

    def restore(self, replies: Iterable[Key]) -> None:
        """Know of former episodes what `copy` gave, and nothing else."""
        self._spent = OrderedDict.fromkeys(replies)

    def find(
        self, tenant: str, subject: str, messages: Sequence[Message], digests: Sequence[bytes]
    ) -> SessionMatch | None:
        """The nameless episode that these messages go on from; None where there is none, or more than one could be."""
        sessions = {
            session.id: session
            for message in messages
            for id in _ids(message)
            if (session := self._told.get((tenant, subject, id))) is not None
        }
        if len(sessions) == 1:
            return SessionMatch(sessions.popitem()[1], proven=True, by="call_id")
        owner: GatewaySession | None = None
        for count in range(len(messages), 0, -1):
            if messages[count - 1]["role"] != "assistant":
                continue
            key = (tenant, subject, digests[count])
            owners = self._owners.get(key)
            if owner is None:
                if owners is None and key not in self._spent:
                    continue
                if owners is None or len(owners) != 1 or key in self._spent or not owners[0].nameless:
                    return None
                owner = owners[0]
            # The ids of our calls are random: whoever echoes one was told it.
            if owners == [owner] and messages[count - 1].get("tool_calls"):
                return SessionMatch(owner, proven=True, by="prefix")
        return None if owner is None else SessionMatch(owner, proven=bool(subject), by="prefix")
