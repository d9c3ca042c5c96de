"""Responses that a later request may name by their ids, and what they answered: the items of a conversation that its
client need not send again.

A response keeps what its request added to an earlier one, so that a conversation takes memory by its length, whether
its client names the response before or sends everything again.

An upstream's responses are kept beside those of our engines, for what their callers' next requests name.

Invariants: a conversation is given whole or not at all; nobody is given what another caller was told, and learns no
more of it than of an id that nobody has; an id that upstreams gave to two responses means none of them; memory is
bounded in bytes and by time: of the tenant that holds most, what was not used for longest goes first; what is kept
follows from the recorded calls alone, so that a restart makes it again."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import orjson

from millrace.dialects.errors import bad_request
from millrace.dialects.stored_responses import (
    ORIGIN,
    OURS,
    Given,
    Owner,
    Recall,
    ResponseOrigin,
    StoredResponse,
    items_of,
    output_of,
)
from millrace.producers.gateway.sessions.session import GatewaySession
from millrace.schemas.ids import now_micros

STORED_BYTES = 64 << 20
"""memory of all that is kept"""
DOUBTFUL = 10_000
"""ids of upstreams that are remembered since they mean two responses"""
OVERHEAD = 512
"""bytes of memory that a response takes beside its text, and of each of its items"""


def owner_of(session: GatewaySession) -> Owner:
    """Whose the conversation of a session is. An episode that its caller named, or that nobody named, may be followed
    by another of the same caller; one that was started is its own."""
    if session.alias is not None:
        return named(session.tenant, session.subject, session.alias)
    return nameless(session.tenant, session.subject) if session.nameless else (session.tenant, "started", session.id)


def named(tenant: str, subject: str, name: str) -> Owner:
    """A conversation that its caller named."""
    return tenant, "named", subject, name


def nameless(tenant: str, subject: str) -> Owner:
    """The conversations of who names none."""
    return tenant, "nameless", subject


def origin_of(headers: Mapping[str, str], *, whole: bool) -> ResponseOrigin | None:
    """What `note` wrote there; None where nothing did."""
    if ORIGIN not in headers:
        return None
    where, _, by = headers[ORIGIN].partition(" ")
    return ResponseOrigin(by, where == "away", whole)


@dataclass(slots=True)
class TenantResponses:
    """What one tenant holds, what was not used for longest first, and its bytes."""

    kept: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    size: int = 0

    @property
    def oldest(self) -> StoredResponse:
        return next(iter(self.kept.values()))


class NewestConversation(NamedTuple):
    """The newest conversation of a session: the items of its last request, and the response to it."""

    kept: StoredResponse
    asked: list[bytes]
    answered: list[bytes]


def items_alone(response: bytes) -> bytes:
    """The items of an upstream's response, or the message that it is, and nothing else of it."""
    fields = orjson.loads(response)  # as it was read before: of any numbers
    output = fields.get("output")
    if fields.get("type") == "message":
        output = [{"role": "assistant", "content": fields.get("content")}]
    items = [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []
    return orjson.dumps({"output": items})


class ResponseStore:
    """The responses of one gateway. Those that nobody used for `idle_s` are forgotten."""

    def __init__(self, idle_s: float, most: int = STORED_BYTES) -> None:
        self._idle_us, self._most = int(idle_s * 1e6), most
        self._kept: dict[str, StoredResponse] = {}
        self._of: dict[str, TenantResponses] = {}
        self._newest: dict[str, NewestConversation] = {}
        self._items: dict[str, str] = {}
        """item -> response, of items whose ids do not say it; "" for an id that means items of two"""
        self._doubtful: OrderedDict[str, None] = OrderedDict()
        self.size = 0
        """bytes, roughly"""

    def keep(
        self,
        id: str,
        session: GatewaySession,
        given: Given,
        response: bytes,
        at: int | None = None,
        *,
        origin: ResponseOrigin = OURS,
    ) -> None:
        """A caller was told this response (JSON) at `at` (micros; now where None)."""
        if origin.away:
            response = items_alone(response)
        if origin is not OURS and not self._new(id, session, response):
            return
        owned = _owned(response, origin)
        if not origin.whole:  # whoever names it is in its session, and that is all that is known
            given = Given([], None)
        known, before, follows = self._known(session, given) if origin.whole else ([], None, False)
        new = given.items[len(known) :]
        size = OVERHEAD * (2 + len(new) + len(owned)) + sum(map(sys.getsizeof, new)) + 2 * len(response)
        kept = StoredResponse(id, owner_of(session), session.id, before, follows, (new, response), size, owned, origin)
        self._drop(id)
        self._kept[id] = kept
        tenant = self._of.setdefault(session.tenant, TenantResponses())
        tenant.kept[id] = kept
        tenant.size += size
        if origin.whole:
            self._newest[session.id] = NewestConversation(kept, known + new, output_of(response))
        for item in owned:
            self._items[item] = id if self._items.get(item, id) == id else ""
        self.size += size
        self.touch([kept], at)
        self.sweep(kept.used)

    def _new(self, id: str, session: GatewaySession, response: bytes) -> bool:
        """Whether an upstream's id means this response alone."""
        former = self._kept.get(id)
        if former is None:
            return id not in self._doubtful
        same = former.said is not None and (former.session, former.said[1]) == (session.id, response)
        if former.origin is not OURS and not same:
            self._drop(id)
            self._doubtful[id] = None
            if len(self._doubtful) > DOUBTFUL:
                self._doubtful.popitem(last=False)
        return False

    def _known(self, session: GatewaySession, given: Given) -> tuple[list[bytes], StoredResponse | None, bool]:
        """The items with which a request begins that are kept already; the response behind which what is new in it
        stands, and whether it goes on from what that answered."""
        previous, newest = self._kept.get(given.previous or ""), self._newest.get(session.id)
        if previous is not None and previous.session == session.id:
            known = self.conversation(previous)
            if known is not None and given.items[: len(known)] == known:
                return known, previous, True
        if newest is not None and given.items[: len(newest.asked)] == newest.asked:
            return newest.asked, newest.kept, False
        return [], None, False

    def conversation(self, kept: StoredResponse) -> list[bytes] | None:
        """The items up to the end of a response; None where a part of them is forgotten."""
        newest = self._newest.get(kept.session)
        if newest is not None and newest.kept is kept:
            return newest.asked + newest.answered
        return kept.conversation()

    def find(self, owner: Owner, id: str) -> StoredResponse | None:
        """The response of an id; None for one that is not known, or that is not the owner's."""
        kept = self._kept.get(id)
        return kept if kept is not None and kept.owner == owner and not kept.deleted else None

    def delete(self, id: str) -> bool:
        """A response can be named no more. False: it is not known."""
        kept = self._kept.get(id)
        if kept is not None:
            kept.deleted = True
        return kept is not None

    def foreign(self, owner: Owner, id: str) -> bool:
        """Whether an id is that of a response which another owner was told."""
        kept = self._kept.get(id)
        return kept is not None and kept.owner != owner

    def knows(self, id: str) -> bool:
        """Whether anybody was told a response of this id, or an item."""
        return id in self._kept or id in self._doubtful or id in self._items or self.holder(id) in self._kept

    def holder(self, item: str) -> str:
        """The id of the response whose item this would be."""
        return self._items.get(item) or f"resp_{item.partition('_')[2].rpartition('_')[0]}"

    def touch(self, used: Iterable[StoredResponse], at: int | None = None) -> None:
        """Responses were used, and with them those that they go on from."""
        now = at or now_micros()
        for kept in used:
            line: list[StoredResponse] = []
            here: StoredResponse | None = kept
            while here is not None and here.used < now:
                line.append(here)
                here = here.before
            for one in reversed(line):
                one.used = now
                if self._kept.get(one.id) is one:
                    self._of[one.owner[0]].kept.move_to_end(one.id)

    @property
    def sessions(self) -> set[str]:
        """The sessions whose responses are kept."""
        return {kept.session for kept in self._kept.values()}

    @property
    def doubtful(self) -> list[str]:
        """Ids of upstreams that mean two responses, the oldest first."""
        return list(self._doubtful)

    def restore(self, doubtful: Iterable[str]) -> None:
        """These ids mean two responses, before any response is kept."""
        self._doubtful = OrderedDict.fromkeys(doubtful)

    def sweep(self, now: int) -> None:
        """Forget what is too much, or was not used for too long, at `now` (micros)."""
        for tenant in [*self._of.values()]:
            while tenant.kept and now - tenant.oldest.used > self._idle_us:
                self._drop(tenant.oldest.id)
        while self.size > self._most:
            self._drop(max(self._of.values(), key=attrgetter("size")).oldest.id)

    def _drop(self, id: str) -> None:
        kept = self._kept.pop(id, None)
        if kept is None or kept.said is None:
            return
        tenant = self._of[kept.owner[0]]
        del tenant.kept[id]
        tenant.size -= kept.size
        if not tenant.kept:
            del self._of[kept.owner[0]]
        for item in kept.owned:
            self._items.pop(item, None)
        self._newest.pop(kept.session, None)  # it holds what is forgotten here
        self.size -= kept.size
        kept.said = kept.before = None


def _owned(response: bytes, origin: ResponseOrigin) -> tuple[str, ...]:
    """The items of a response whose ids do not say whose they are."""
    items = items_of(response)
    if origin.away:
        return tuple(item["id"] for item in items if isinstance(item.get("id"), str))
    return tuple(item["id"] for item in items if item["type"] == "function_call")


class ResponseRecall(Recall):
    """What one caller may name in one call, `most` bytes of items. `used`: the responses that it named and that are
    known."""

    def __init__(self, stored: ResponseStore, owner: Owner, most: int) -> None:
        self._stored, self._owner, self._room = stored, owner, most
        self._read: dict[str, dict[Any, bytes]] = {}
        """response -> its items by their ids, each response read once"""
        self.used: list[StoredResponse] = []

    def conversation(self, id: str) -> list[bytes] | None:
        """The items up to the end of a response; None where it is not known. Raises ApiError 400 beyond `most`."""
        kept = self._stored.find(self._owner, id)
        items = None if kept is None else self._stored.conversation(kept)
        if kept is None or items is None:
            return None
        self.used.append(kept)
        return self._given(items)

    def item(self, id: str) -> bytes | None:
        """One item of a response; None where it is not known. Raises ApiError 400 beyond `most`."""
        holder = self._stored.holder(id)
        if holder not in self._read:
            kept = self._stored.find(self._owner, holder)
            said = None if kept is None else kept.said
            if kept is None or said is None:
                return None
            self.used.append(kept)
            self._read[holder] = {item.get("id"): msgspec.json.encode(item) for item in items_of(said[1])}
        found = self._read[holder].get(id)
        return None if found is None else self._given([found])[0]

    def _given(self, items: list[bytes]) -> list[bytes]:
        self._room -= sum(map(len, items))
        if self._room < 0:
            said = "The conversation is longer than a request may be"
            raise bad_request(said, param="input", code="context_length_exceeded")
        return items

    def known(self, id: str) -> bool:
        """Whether a response of this id is known, if only whose it is; it is used then."""
        kept = self._stored.find(self._owner, id)
        if kept is not None:
            self.used.append(kept)
        return kept is not None

    def foreign(self, id: str) -> bool:
        """Whether another caller was told a response of this id, or an item."""
        return any(self._stored.foreign(self._owner, one) for one in (id, self._stored.holder(id)))

    def response(self, id: str) -> bytes | None:
        """The whole response; None where it is not known, or not kept here."""
        kept = self._stored.find(self._owner, id)
        return None if kept is None or kept.said is None or kept.origin.away else kept.said[1]

    def asked(self, id: str) -> list[bytes] | None:
        """The items that a response was asked with, from the beginning of its conversation; None where they are not
        known."""
        kept = self._stored.find(self._owner, id)
        items = None if kept is None else self._stored.conversation(kept)
        if kept is None or items is None or kept.said is None:
            return None
        return items[: len(items) - len(output_of(kept.said[1]))]

    def away(self, id: str) -> str | None:
        """The upstream that keeps a response itself; None for one that is kept here, or not known."""
        kept = self._stored.find(self._owner, id)
        return kept.origin.by if kept is not None and kept.origin.away else None
