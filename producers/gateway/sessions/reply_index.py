"""What was said in the sessions of one gateway: the one index of replies, of calls that end now and of logged ones.

    a choice of a call -> note_echo -> its record in the log -> learn

Beside a session lie what its calls asked and said (`asks`, `requests`) and its tokens (`lineages`); here lies what is
looked up over all sessions: `owners` of what a caller echoes, `givers` of a reply's id, `stored` responses.

Invariants: a start takes the same two steps with every call of the log, so that it leaves the index that the process
before it had; of what a checkpoint covers, it takes `owners` and `givers` whole and keeps the stored responses again; a
response that its caller deleted is not given back by any start."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from millrace.dialects.rendering.base import Message
from millrace.dialects.stored_responses import LOCAL_ORIGIN, ResponseOrigin, StoredRequest
from millrace.producers.gateway.sessions.deletions import DeletedResponses
from millrace.producers.gateway.sessions.ownership import ReplyOwners
from millrace.producers.gateway.sessions.responses import ResponseStore
from millrace.producers.gateway.sessions.session import GatewaySession
from millrace.schemas.requests import RequestOutline

MOST_REPLIES = 100_000
"""replies whose givers are remembered, about 20 MB of them"""


class ChoiceReply(NamedTuple):
    """What one choice of an answer said. `digest`: of the conversation with it; `request`: what its request said, where
    later ones may name the response; `has_our_ids`: the ids of its tool calls were minted here."""

    id: str
    choice: int
    message: Message
    digest: bytes
    response: bytes
    finish: str
    request: StoredRequest | None = None
    origin: ResponseOrigin = LOCAL_ORIGIN
    has_our_ids: bool = False


class ChoiceExchange(NamedTuple):
    """A choice with what was asked. `policy`: who answered; `replaces`: the response that the client got to the same
    request before; `asked_at`, `replied_at`: micros."""

    policy: str
    messages: Sequence[Message]
    outline: RequestOutline | None
    replaces: str | None
    reply: ChoiceReply
    asked_at: int
    replied_at: int


class ReplyIndex:
    """That of the gateway whose folder this is. Responses that nobody used for `idle_s` seconds are forgotten."""

    def __init__(self, folder: Path, idle_s: float) -> None:
        self.owners = ReplyOwners()
        self.givers = ReplyGivers()
        self.stored = ResponseStore(idle_s)
        self._deleted = DeletedResponses(folder)

    def note_echo(self, session: GatewaySession, reply: ChoiceReply) -> None:
        """The caller may echo a reply, whatever becomes of its record."""
        if not session.has_grant:
            self.owners.add_digest(session, reply.digest)
        if reply.has_our_ids and session.nameless:
            self.owners.add_call_ids(session, reply.message)

    def learn(
        self, session: GatewaySession, exchange: ChoiceExchange, event: str | None, *, stores: bool = True
    ) -> None:
        """A call is over. `event`: the id of its record, None where that is lost; `stores`: whether its response may be
        named later."""
        reply = exchange.reply
        if event is not None:
            session.said_before(exchange.policy).add(event, exchange.outline)
            session.newest_reply = reply.id, reply.digest
            self.givers.add(session.tenant, reply.id, session.id)
        if stores:
            self.store(session, reply, exchange.replied_at)
        session.asks.note_call(exchange.messages, exchange.asked_at, exchange.replaces)
        session.asks.note_reply(reply.id, reply.message, exchange.replied_at)
        session.newest_text = reply.message["content"] or session.newest_text

    def store(self, session: GatewaySession, reply: ChoiceReply, at: int) -> None:
        """Keep a response that was told at `at` (micros), where a later request may name it."""
        if reply.request is not None:
            self.stored.keep(reply.id, session, reply.request, reply.response, at, origin=reply.origin)

    def retire(self, session: GatewaySession) -> None:
        """Nothing goes on in a session."""
        self.owners.retire(session)

    def delete(self, response: str) -> None:
        """Nobody may name a response any more, also after a restart. Raises OSError where the disk does not take
        that."""
        self._deleted.add(response)
        self.stored.delete(response)

    def settle(self) -> None:
        """A start has read the log: what was deleted before it is forgotten again."""
        self._deleted.settle(self.stored.delete)


class SeveralReplies(Exception):
    """More than one session gave a reply of this id."""


class ReplyGivers:
    """Which session gave which reply, so that feedback may name the reply alone: of all sessions of one gateway.

    Invariants: a reply's id is looked up within its tenant only; one that several sessions of a tenant gave, as an
    upstream's may be, names none of them; the newest `MOST_REPLIES` are known."""

    def __init__(self, most_replies: int = MOST_REPLIES) -> None:
        self._most_replies = most_replies
        self._sessions: OrderedDict[bytes, str | None] = OrderedDict()

    def add(self, tenant: str, response: str, session: str) -> None:
        """A session gave a reply; once more for each choice of it."""
        key = _key(tenant, response)
        owner = self._sessions.get(key, session)
        self._sessions[key] = session if owner == session else None
        self._sessions.move_to_end(key)
        while len(self._sessions) > self._most_replies:
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
