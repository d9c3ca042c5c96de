"""A conversation of the Model Context Protocol, folded into tool calls and tool results: both eras, either transport.

The fold reads what passes and decides nothing about it. Its events are those of `POST /v1/sessions/{id}/events`.

Invariants: every `tools/call` request is one tool call; the first answer to it, or its cancellation, is its one result;
an answer to nothing that waits is no event; a call that is asked again because the server wanted more input, or whose
result is fetched as a task, is one call. Ids of the two directions never meet."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from millrace.producers.gateway.episodes.bodies import ToolCallIn, ToolResultIn, post_body
from millrace.producers.intake import jsonrpc
from millrace.producers.intake.conversation import ConversationFold, Event
from millrace.producers.intake.jsonrpc import Message
from millrace.schemas import bounds
from millrace.schemas.records import ToolStatus

MOST = 4096
"""requests that may wait for their answers; the oldest are given up"""
MOST_PER_ID = 16
"""requests under one id, which is against the protocol, that may wait at once"""


@dataclass(frozen=True, slots=True)
class PendingToolCall:
    """A tool call that is on its way. `at`: micros."""

    call_id: str
    name: str
    arguments: str
    at: int


@dataclass(slots=True)
class ParkedCalls:
    """Calls whose answer was not the result yet: by what their next request names them."""

    calls: OrderedDict[Hashable, PendingToolCall] = field(default_factory=OrderedDict)

    def put(self, name: Hashable, call: PendingToolCall) -> None:
        self.calls[name] = call
        while len(self.calls) > MOST:
            self.calls.popitem(last=False)

    def take(self, name: Hashable) -> PendingToolCall | None:
        return self.calls.pop(name, None)


class Conversation(ConversationFold):
    """One client and one server. `server`: what the server is called; `parked` is shared by all conversations of a
    client where each request is a conversation of its own."""

    def __init__(self, server: str, new_id: Callable[[], str], parked_calls: ParkedCalls | None = None) -> None:
        self._server = server
        self._new_id = new_id
        self._parked_calls = parked_calls or ParkedCalls()
        self._waiting: OrderedDict[Hashable, deque[PendingToolCall | None]] = OrderedDict()

    def from_client(self, message: Message, now: int, traceparent: str | None = None) -> Iterator[Event]:
        """The client said this at `now` (micros)."""
        method, id = jsonrpc.member(message, "method"), jsonrpc.id_of(message)
        params = jsonrpc.members(message, "params")
        if method == "notifications/cancelled" and id is None:
            call = self._pop_call(jsonrpc.id_of(params, "requestId"))
            if call is not None:
                yield _result(call, "cancelled", jsonrpc.text(message["params"]), now)
        elif isinstance(method, str) and id is not None:
            call, is_new = self._call_of(method, params, now)
            self._waiting.setdefault(id, deque(maxlen=MOST_PER_ID)).append(call)
            while len(self._waiting) > MOST:
                self._waiting.popitem(last=False)
            if call is not None and is_new:
                yield _call(call, self._server, _traceparent(params) or traceparent)

    def from_server(self, message: Message, now: int) -> Iterator[Event]:
        """The server said this at `now` (micros)."""
        is_error = "error" in message and bytes(message["error"]) != b"null"
        if "method" in message or not (is_error or "result" in message):
            return
        call = self._pop_call(jsonrpc.id_of(message))
        if call is None:
            return
        if is_error:
            yield _result(call, "error", jsonrpc.text(message["error"]), now)
            return
        result = jsonrpc.members(message, "result")
        next_name = _next_name(call, result)
        if next_name is not None:
            self._parked_calls.put(next_name, call)
            return
        status: ToolStatus = "error" if jsonrpc.member(result, "isError") is True else "ok"
        yield _result(call, status, jsonrpc.text(message["result"]), now)

    def broken_off(self, ids: Iterable[Hashable | None], status: ToolStatus, why: str, now: int) -> Iterator[Event]:
        """No answer comes to these requests, if they still wait."""
        for id in ids:
            call = self._pop_call(id)
            if call is not None:
                yield _result(call, status, why, now)

    def _call_of(self, method: str, params: Message, now: int) -> tuple[PendingToolCall | None, bool]:
        """The tool call that a request makes or goes on with, and whether it begins it."""
        if method == "tasks/result":
            return self._parked_calls.take(("task", jsonrpc.member(params, "taskId"))), False
        name = jsonrpc.member(params, "name")
        if method != "tools/call" or not isinstance(name, str):
            return None, False
        arguments = jsonrpc.text(params["arguments"]) if "arguments" in params else "{}"
        if "requestState" in params or "inputResponses" in params:
            state = jsonrpc.member(params, "requestState")
            call = self._parked_calls.take(("state", state) if isinstance(state, str) else ("call", name, arguments))
            if call is not None:
                return call, False
        return PendingToolCall(self._new_id(), name, arguments, now), True

    def _pop_call(self, id: Hashable | None) -> PendingToolCall | None:
        queue = self._waiting.get(id) if id is not None else None
        if not queue:
            return None
        call = queue.popleft()
        if not queue:
            del self._waiting[id]
        return call


def _next_name(call: PendingToolCall, result: Message) -> Hashable | None:
    """What the next request of a call is known by, where this answer is not its result."""
    if jsonrpc.member(result, "resultType") == "input_required":
        state = jsonrpc.member(result, "requestState")
        return ("state", state) if isinstance(state, str) else ("call", call.name, call.arguments)
    task = jsonrpc.member(jsonrpc.members(result, "task"), "taskId")
    return ("task", task) if isinstance(task, str) and "content" not in result else None


def _traceparent(params: Message) -> str | None:
    value = jsonrpc.member(jsonrpc.members(params, "_meta"), "traceparent")
    return value if isinstance(value, str) and len(value.encode()) <= bounds.NAME_BYTES else None


def _call(call: PendingToolCall, server: str, traceparent: str | None) -> Event:
    return post_body(
        ToolCallIn,
        call_id=call.call_id,
        name=call.name,
        arguments=call.arguments,
        join=True,
        server=server,
        traceparent=traceparent,
        event_time=call.at,
    )


def _result(call: PendingToolCall, status: ToolStatus, content: str, now: int) -> Event:
    return post_body(
        ToolResultIn,
        call_id=call.call_id,
        name=call.name,
        status=status,
        content=content,
        latency_us=min(max(now - call.at, 0), bounds.WAIT_MS * 1000),
        event_time=now,
    )
