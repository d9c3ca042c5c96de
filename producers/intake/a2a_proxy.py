"""`millrace a2a --url`: another agent behind another port, with a copy of what passes.

Where a key that may start sessions is given, each delegation gets a child of the client's session, begun before the
request is passed on; the agent is handed its key where that is asked for, so that its own model calls are the child's.

Invariants: a gateway that does not answer costs the child alone: the request passes on, and the call and its result
wait in the spool; the agent never sees the key of the client's session; in the agent's card nothing but addresses
changes, and signatures go, since they fit no more; an address on another server than the agent's is left out, so that
no delegation goes past the capture."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import orjson
from aiohttp import web
from multidict import CIMultiDict

from millrace.infra.config import is_local
from millrace.infra.errors import ConfigError
from millrace.producers.intake import jsonrpc
from millrace.producers.intake.a2a import DelegationExchange, Delegations, keep
from millrace.producers.intake.capture import Capture
from millrace.producers.intake.conversation import Owner
from millrace.producers.intake.reverse import KEY_HEADER, Exchange, ReverseProxy, key_in, passed_on, passing
from millrace.producers.session_keys import session_id
from millrace.schemas.ids import new_id
from millrace.schemas.json_values import Json

PATHS = ("/.well-known/agent-card.json", "/.well-known/agent.json", "/extendedAgentCard", "/v1/card")
"""where agents show their card over HTTP, in any of the versions"""


def rewrite_card(card: bytes, origin: str, address: str) -> bytes:
    """A card of the server at `origin`, as the proxy at `address` (both `http://HOST:PORT`, ours with the session's key
    behind it where a path names it) shows it. Raises ConfigError for one that names no address there, ValueError for
    what is no card."""
    content = orjson.loads(card)
    if not isinstance(content, dict):
        raise ValueError("a card is a JSON object")
    urls: list[str] = []
    has_address = False
    for list_name in ("supportedInterfaces", "additionalInterfaces"):
        if isinstance(content.get(list_name), list):
            entries = [_move(one, origin, address, urls) for one in content[list_name]]
            content[list_name] = [one for one in entries if one is not None]
            has_address = has_address or bool(content[list_name])
    if isinstance(content.get("url"), str):
        entry = _move(content, origin, address, urls)
        if entry is None:
            del content["url"]
        has_address = has_address or entry is not None
    if not has_address:
        raise ConfigError(
            f"the agent's card names {', '.join(urls) or 'no address'}, none of them on {origin}: "
            "start the proxy with --url at an address that the card names"
        )
    content.pop("signatures", None)
    return orjson.dumps(content)


def _move(one: object, origin: str, address: str, urls: list[str]) -> Json:
    """What has a `url`, with ours; None for one on another server."""
    if not isinstance(one, dict) or not isinstance(one.get("url"), str):
        return None
    urls.append(one["url"])
    parts = urlsplit(one["url"])
    if _server(f"{parts.scheme}://{parts.netloc}") != _server(origin):
        return None
    one["url"] = address.rstrip("/") + urlunsplit(("", "", parts.path, parts.query, parts.fragment))
    return one


def _server(origin: str) -> tuple[str, str, int | None]:
    """What tells two servers apart: this machine has many names."""
    parts = urlsplit(origin)
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        port = None
    host = parts.hostname or ""
    return parts.scheme, "localhost" if host == "0.0.0.0" or is_local(host) else host, port


URL_HEADER = "x-millrace-url"
CHILD_S = 2.0
"""that a request waits for its child to begin"""
READ_BYTES = 8 << 20
"""of a request that is read before it is passed on; a larger one passes unread"""
CARD_BYTES = 4 << 20
CANCELLATION = '{"cancelled":"the client left before the result"}'
NO_RESULT = '{"error":"the answer ended without a result"}'
REST = (
    (re.compile(r"/message:(send|stream)$"), "SendMessage"),
    (re.compile(r"/tasks/([^/:]+)$"), "GetTask"),
    (re.compile(r"/tasks/([^/:]+):cancel$"), "CancelTask"),
    (re.compile(r"/tasks/([^/:]+):subscribe$"), "SubscribeToTask"),
)
"""end of a path of HTTP+JSON -> its method in JSON-RPC"""


class Children(NamedTuple):
    """How a delegation's own session begins. `key`: one that may start sessions; `hands_on`: whether the agent is told
    the child's key."""

    key: str
    hands_on: bool


class A2aProxy(ReverseProxy):
    """In front of the agent that records call `agent`. `children`: None begins none."""

    def __init__(
        self,
        url: str,
        agent: str,
        capture: Capture,
        base_url: str,
        owner: Owner | None,
        tell: Callable[[str], None],
        host: str = "127.0.0.1",
        children: Children | None = None,
    ) -> None:
        super().__init__(url, capture, base_url, owner, tell, host)
        self._agent = agent
        self._sessions: OrderedDict[str, Delegations] = OrderedDict()
        self.children = children

    def exchange(self, owner: Owner, request: web.BaseRequest) -> Exchange:
        """What captures a request."""
        delegations = self._sessions.get(owner.key) or Delegations(self._agent, lambda: f"a2a-{new_id()}")
        keep(self._sessions, owner.key, delegations)
        return A2aExchange(self, owner, DelegationExchange(delegations, path_method(request)), request)

    async def child(self, owner: Owner, call_id: str) -> Owner | None:
        """A new session, child of the owner's; None, and said, where none begins."""
        assert self.http is not None
        assert self.children is not None
        reply: Any = None
        try:
            async with self.http.post(
                f"{owner.base_url}/sessions",
                json={"parent": session_id(owner.key), "spawn_call": call_id},
                headers={"authorization": f"Bearer {self.children.key}"},
                timeout=aiohttp.ClientTimeout(total=CHILD_S),
            ) as answer:
                reply = orjson.loads(await answer.read())
                return Owner(reply["api_key"], owner.base_url)
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
            self.tell(f"a delegation has no session of its own: {_error_message(reply) or repr(error)}")
            return None

    async def answer(
        self, request: web.BaseRequest, answer: aiohttp.ClientResponse, exchange: Exchange | None
    ) -> web.StreamResponse:
        """Pass an answer back; a card with our address in it."""
        key, path = key_in(request.raw_path)
        if request.method != "GET" or answer.status != 200 or not path.partition("?")[0].endswith(PATHS):
            return await super().answer(request, answer, exchange)
        card = await answer.content.read(CARD_BYTES + 1)
        while not answer.content.at_eof() and len(card) <= CARD_BYTES:
            card += await answer.content.read(CARD_BYTES + 1 - len(card))
        address = f"{request.scheme}://{request.host}" + (f"/{key}" if key else "")
        try:
            body = rewrite_card(card, self.origin, address)
        except (ConfigError, ValueError) as error:
            self.tell(str(error))
            return web.Response(status=502, text=f"{error}\n")
        headers = CIMultiDict(passed_on(answer.headers))
        for name in ("content-length", "etag", "digest", "content-digest"):
            headers.popall(name, None)
        return web.Response(body=body, headers=headers)


class A2aExchange(Exchange):
    """One request of an agent's client."""

    fold: DelegationExchange

    def __init__(self, proxy: A2aProxy, owner: Owner, fold: DelegationExchange, request: web.BaseRequest) -> None:
        super().__init__(proxy.capture, owner, fold, request)
        self._proxy = proxy
        if not request.can_read_body and fold.by_path:
            self._read_path()

    async def body(self, request: web.BaseRequest) -> AsyncIterable[bytes]:
        """The request, once it was read whole and its children are begun."""
        parts: list[bytes] = []
        size = 0
        async for part in request.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > READ_BYTES:
                self.capture.passed_unread()
                return _rest(parts, request)
        data = b"".join(parts)
        await self._begin(data)
        self.client.feed(data)
        self.client.end()
        return _rest([data], None)

    def end(self, status: int) -> None:
        """The answer has passed: a task that it named goes on."""
        if status >= 400:
            self.fail(status)
        else:
            self.client.break_off(self.client.ids, "error", NO_RESULT)

    def cancel(self) -> None:
        """The client is gone: a task that was named goes on."""
        self.client.break_off(self.client.ids, "cancelled", CANCELLATION)

    def _read_path(self) -> None:
        """A request of HTTP+JSON that has no body says all in its path."""
        self.client.feed(b"{}")
        self.client.end()

    async def _begin(self, data: bytes) -> None:
        """Begin the child of a message that this request sends."""
        children = self._proxy.children
        if children is None:
            return
        with suppress(ValueError):  # said to be unread where it is captured
            for message in jsonrpc.messages(data)[:1]:
                call_id = self.fold.begins(message)
                child = await self._proxy.child(self.owner, call_id) if call_id else None
                self.fold.give(child)
                if child is not None and children.hands_on:
                    self.added = _key_headers(child)


def path_method(request: web.BaseRequest) -> tuple[str, str | None] | None:
    """What a path of HTTP+JSON asks for, and of which task; None for a request that says so itself."""
    _, path = key_in(request.raw_path)
    for pattern, method in REST:
        match = pattern.search(path.partition("?")[0])
        if match is not None:
            return method, (None if method == "SendMessage" else match[1])
    return None


def _key_headers(child: Owner) -> Mapping[str, str]:
    return {KEY_HEADER: child.key, URL_HEADER: child.base_url}


async def _rest(parts: list[bytes], request: web.BaseRequest | None) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    if request is not None:
        async for part in passing(request.content, None, None):
            yield part


def _error_message(answer: Any) -> str:
    """The message of a gateway's error."""
    try:
        return str(answer["error"]["message"])
    except (LookupError, TypeError):
        return ""
