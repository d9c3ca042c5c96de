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
    LOCAL_ORIGIN,
    ORIGIN,
    Owner,
    Recall,
    ResponseOrigin,
    StoredRequest,
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
        return named_owner(session.tenant, session.subject, session.alias)
    return (
        nameless_owner(session.tenant, session.subject) if session.nameless else (session.tenant, "started", session.id)
    )


def named_owner(tenant: str, subject: str, name: str) -> Owner:
    """A conversation that its caller named."""
    return tenant, "named", subject, name


def nameless_owner(tenant: str, subject: str) -> Owner:
    """The conversations of who names none."""
    return tenant, "nameless", subject


def origin_of(headers: Mapping[str, str], *, is_whole: bool) -> ResponseOrigin | None:
    """What `note` wrote there; None where nothing did."""
    if ORIGIN not in headers:
        return None
    where, _, by = headers[ORIGIN].partition(" ")
    return ResponseOrigin(by, where == "away", is_whole)


@dataclass(slots=True)
class TenantResponses:
    """What one tenant holds, what was not used for longest first, and its bytes."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    size: int = 0

    @property
    def oldest(self) -> StoredResponse:
        return next(iter(self.responses.values()))


class NewestConversation(NamedTuple):
    """The newest conversation of a session: the items of its last request, and the response to it."""

    response: StoredResponse
    request_items: list[bytes]
    reply_items: list[bytes]


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
        request: StoredRequest,
        response: bytes,
        at: int | None = None,
        *,
        origin: ResponseOrigin = LOCAL_ORIGIN,
    ) -> None:
        """A caller was told this response (JSON) at `at` (micros; now where None)."""
        if origin.away:
            response = items_alone(response)
        if origin is not LOCAL_ORIGIN and not self._is_new(id, session, response):
            return
        item_ids = _item_ids(response, origin)
        if not origin.whole:  # whoever names it is in its session, and that is all that is known
            request = StoredRequest([], None)
        known_items, before, follows = self._known_prefix(session, request) if origin.whole else ([], None, False)
        new_items = request.items[len(known_items) :]
        size = OVERHEAD * (2 + len(new_items) + len(item_ids)) + sum(map(sys.getsizeof, new_items)) + 2 * len(response)
        stored_response = StoredResponse(
            id, owner_of(session), session.id, before, follows, (new_items, response), size, item_ids, origin
        )
        self._drop(id)
        self._kept[id] = stored_response
        tenant = self._of.setdefault(session.tenant, TenantResponses())
        tenant.responses[id] = stored_response
        tenant.size += size
        if origin.whole:
            self._newest[session.id] = NewestConversation(stored_response, known_items + new_items, output_of(response))
        for item in item_ids:
            self._items[item] = id if self._items.get(item, id) == id else ""
        self.size += size
        self.touch([stored_response], at)
        self.sweep(stored_response.used)

    def _is_new(self, id: str, session: GatewaySession, response: bytes) -> bool:
        """Whether an upstream's id means this response alone."""
        former = self._kept.get(id)
        if former is None:
            return id not in self._doubtful
        is_same = former.said is not None and (former.session, former.said[1]) == (session.id, response)
        if former.origin is not LOCAL_ORIGIN and not is_same:
            self._drop(id)
            self._doubtful[id] = None
            if len(self._doubtful) > DOUBTFUL:
                self._doubtful.popitem(last=False)
        return False

    def _known_prefix(
        self, session: GatewaySession, request: StoredRequest
    ) -> tuple[list[bytes], StoredResponse | None, bool]:
        """The items with which a request begins that are kept already; the response behind which what is new in it
        stands, and whether it goes on from what that answered."""
        previous, newest = self._kept.get(request.previous or ""), self._newest.get(session.id)
        if previous is not None and previous.session == session.id:
            known_items = self.conversation(previous)
            if known_items is not None and request.items[: len(known_items)] == known_items:
                return known_items, previous, True
        if newest is not None and request.items[: len(newest.request_items)] == newest.request_items:
            return newest.request_items, newest.response, False
        return [], None, False

    def conversation(self, stored_response: StoredResponse) -> list[bytes] | None:
        """The items up to the end of a response; None where a part of them is forgotten."""
        newest = self._newest.get(stored_response.session)
        if newest is not None and newest.response is stored_response:
            return newest.request_items + newest.reply_items
        return stored_response.conversation()

    def find(self, owner: Owner, id: str) -> StoredResponse | None:
        """The response of an id; None for one that is not known, or that is not the owner's."""
        stored_response = self._kept.get(id)
        return (
            stored_response
            if stored_response is not None and stored_response.owner == owner and not stored_response.deleted
            else None
        )

    def delete(self, id: str) -> bool:
        """A response can be named no more. False: it is not known."""
        stored_response = self._kept.get(id)
        if stored_response is not None:
            stored_response.deleted = True
        return stored_response is not None

    def is_foreign(self, owner: Owner, id: str) -> bool:
        """Whether an id is that of a response which another owner was told."""
        stored_response = self._kept.get(id)
        return stored_response is not None and stored_response.owner != owner

    def knows(self, id: str) -> bool:
        """Whether anybody was told a response of this id, or an item."""
        return id in self._kept or id in self._doubtful or id in self._items or self.holder(id) in self._kept

    def holder(self, item: str) -> str:
        """The id of the response whose item this would be."""
        return self._items.get(item) or f"resp_{item.partition('_')[2].rpartition('_')[0]}"

    def touch(self, used: Iterable[StoredResponse], at: int | None = None) -> None:
        """Responses were used, and with them those that they go on from."""
        now = at or now_micros()
        for stored_response in used:
            line: list[StoredResponse] = []
            here: StoredResponse | None = stored_response
            while here is not None and here.used < now:
                line.append(here)
                here = here.before
            for one in reversed(line):
                one.used = now
                if self._kept.get(one.id) is one:
                    self._of[one.owner[0]].responses.move_to_end(one.id)

    @property
    def sessions(self) -> set[str]:
        """The sessions whose responses are kept."""
        return {stored_response.session for stored_response in self._kept.values()}

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
            while tenant.responses and now - tenant.oldest.used > self._idle_us:
                self._drop(tenant.oldest.id)
        while self.size > self._most:
            self._drop(max(self._of.values(), key=attrgetter("size")).oldest.id)

    def _drop(self, id: str) -> None:
        stored_response = self._kept.pop(id, None)
        if stored_response is None or stored_response.said is None:
            return
        tenant = self._of[stored_response.owner[0]]
        del tenant.responses[id]
        tenant.size -= stored_response.size
        if not tenant.responses:
            del self._of[stored_response.owner[0]]
        for item in stored_response.owned:
            self._items.pop(item, None)
        self._newest.pop(stored_response.session, None)  # it holds what is forgotten here
        self.size -= stored_response.size
        stored_response.said = stored_response.before = None


def _item_ids(response: bytes, origin: ResponseOrigin) -> tuple[str, ...]:
    """The items of a response whose ids do not say whose they are."""
    items = items_of(response)
    if origin.away:
        return tuple(item["id"] for item in items if isinstance(item.get("id"), str))
    return tuple(item["id"] for item in items if item["type"] == "function_call")


class ResponseRecall(Recall):
    """What one caller may name in one call, `most` bytes of items. `used`: the responses that it named and that are
    known."""

    def __init__(self, store: ResponseStore, owner: Owner, most: int) -> None:
        self._stored, self._owner, self._room = store, owner, most
        self._read: dict[str, dict[Any, bytes]] = {}
        """response -> its items by their ids, each response read once"""
        self.used: list[StoredResponse] = []

    def conversation(self, id: str) -> list[bytes] | None:
        """The items up to the end of a response; None where it is not known. Raises ApiError 400 beyond `most`."""
        stored_response = self._stored.find(self._owner, id)
        items = None if stored_response is None else self._stored.conversation(stored_response)
        if stored_response is None or items is None:
            return None
        self.used.append(stored_response)
        return self._charge(items)

    def item(self, id: str) -> bytes | None:
        """One item of a response; None where it is not known. Raises ApiError 400 beyond `most`."""
        holder = self._stored.holder(id)
        if holder not in self._read:
            stored_response = self._stored.find(self._owner, holder)
            parts = None if stored_response is None else stored_response.said
            if stored_response is None or parts is None:
                return None
            self.used.append(stored_response)
            self._read[holder] = {item.get("id"): msgspec.json.encode(item) for item in items_of(parts[1])}
        item_bytes = self._read[holder].get(id)
        return None if item_bytes is None else self._charge([item_bytes])[0]

    def _charge(self, items: list[bytes]) -> list[bytes]:
        self._room -= sum(map(len, items))
        if self._room < 0:
            message = "The conversation is longer than a request may be"
            raise bad_request(message, param="input", code="context_length_exceeded")
        return items

    def is_known(self, id: str) -> bool:
        """Whether a response of this id is known, if only whose it is; it is used then."""
        stored_response = self._stored.find(self._owner, id)
        if stored_response is not None:
            self.used.append(stored_response)
        return stored_response is not None

    def is_foreign(self, id: str) -> bool:
        """Whether another caller was told a response of this id, or an item."""
        return any(self._stored.is_foreign(self._owner, one) for one in (id, self._stored.holder(id)))

    def response(self, id: str) -> bytes | None:
        """The whole response; None where it is not known, or not kept here."""
        stored_response = self._stored.find(self._owner, id)
        return (
            None
            if stored_response is None or stored_response.said is None or stored_response.origin.away
            else stored_response.said[1]
        )

    def request_items(self, id: str) -> list[bytes] | None:
        """The items that a response was asked with, from the beginning of its conversation; None where they are not
        known."""
        stored_response = self._stored.find(self._owner, id)
        items = None if stored_response is None else self._stored.conversation(stored_response)
        if stored_response is None or items is None or stored_response.said is None:
            return None
        return items[: len(items) - len(output_of(stored_response.said[1]))]

    def keeper(self, id: str) -> str | None:
        """The upstream that keeps a response itself; None for one that is kept here, or not known."""
        stored_response = self._stored.find(self._owner, id)
        return stored_response.origin.by if stored_response is not None and stored_response.origin.away else None
