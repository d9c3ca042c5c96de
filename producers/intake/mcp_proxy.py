"""`millrace mcp --url`: a streamable HTTP server behind another port, with a copy of what passes. Both eras of MCP.

A request of the first era names its conversation in `mcp-session-id`; one that has none is a conversation of its own,
as every request of the second era is (2026-07-28, which has no sessions)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from aiohttp import web

from millrace.producers.intake.capture import Capture
from millrace.producers.intake.conversation import Owner
from millrace.producers.intake.mcp import Conversation, ParkedCalls
from millrace.producers.intake.reverse import Exchange, ReverseProxy
from millrace.schemas.ids import new_id

SESSION_HEADER = "mcp-session-id"
MOST = 4096
"""conversations that are kept, the newest"""
CANCELLATION = '{"cancelled":"the client left before the result"}'
NO_RESULT = '{"error":"the answer ended without a result"}'


class ServerConversations:
    """Those of one server, by the session they are captured for. The oldest is forgotten."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._named: OrderedDict[tuple[str, str], Conversation] = OrderedDict()
        self._parked_calls: OrderedDict[str, ParkedCalls] = OrderedDict()

    def find(self, key: str, name: str | None) -> Conversation:
        """The conversation that a request belongs to."""
        parked_calls = self._parked_calls.setdefault(key, ParkedCalls())
        _limit(self._parked_calls, key)
        if name is None:
            return Conversation(self._server, _call_id, parked_calls)
        conversation = self._named.setdefault((key, name), Conversation(self._server, _call_id, parked_calls))
        _limit(self._named, (key, name))
        return conversation

    def forget(self, key: str, name: str | None) -> None:
        """Its client says that it is over."""
        self._named.pop((key, name or ""), None)


def _limit(entries: OrderedDict[Any, Any], newest: object) -> None:
    entries.move_to_end(newest)
    while len(entries) > MOST:
        entries.popitem(last=False)


def _call_id() -> str:
    return f"mcp-{new_id()}"


class McpProxy(ReverseProxy):
    """In front of the MCP server that records call `server`."""

    def __init__(
        self,
        url: str,
        server: str,
        capture: Capture,
        base_url: str,
        owner: Owner | None,
        tell: Callable[[str], None],
        host: str = "127.0.0.1",
    ) -> None:
        super().__init__(url, capture, base_url, owner, tell, host)
        self._conversations = ServerConversations(server)

    def exchange(self, owner: Owner, request: web.BaseRequest) -> Exchange:
        """What captures a request."""
        name = request.headers.get(SESSION_HEADER)
        conversation = self._conversations.find(owner.key, name)
        if request.method == "DELETE":
            self._conversations.forget(owner.key, name)
        return McpExchange(self.capture, owner, conversation, request)


class McpExchange(Exchange):
    """One of a conversation that goes on, or that is a conversation of its own."""

    def __init__(self, capture: Capture, owner: Owner, conversation: Conversation, request: web.BaseRequest) -> None:
        super().__init__(capture, owner, conversation, request)
        self._alone = SESSION_HEADER not in request.headers

    def end(self, status: int) -> None:
        """The answer has passed. In a conversation that goes on a result may come later, in another answer."""
        if status >= 400:
            self.fail(status)
        elif self._alone:
            self.client.break_off(self.client.ids, "error", NO_RESULT)

    def cancel(self) -> None:
        """The client is gone: without a session that is how it cancels."""
        if self._alone:
            self.client.break_off(self.client.ids, "cancelled", CANCELLATION)
