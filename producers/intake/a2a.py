"""What a client asks of another agent over A2A, folded into delegations: version 1.0 and 0.3, JSON-RPC and HTTP+JSON.

A delegation is a tool call of the client's episode, whose tool is the other agent; what that agent did for it is an
episode of its own, the child, where the gateway began one.

Invariants: every message that is sent is one tool call; a message, a task that ends or waits for input, an error or a
client that gives up is its one result; what a task says is told once, by the newest stream that follows it; a child
ends with its task, and a task that waits for input goes on in its child."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from millrace.producers.gateway.episodes.bodies import ObservationIn, ToolCallIn, ToolResultIn, post_body
from millrace.producers.intake import jsonrpc
from millrace.producers.intake.conversation import ChildEvent, ConversationFold, Event, Owner
from millrace.producers.intake.jsonrpc import Message
from millrace.schemas import bounds
from millrace.schemas.records import ToolStatus

MOST = 256
"""tasks that are followed for one session; the oldest are given up"""
ARTIFACT_BYTES = 256 << 10
"""of artifacts that a result repeats; each piece beyond stands in the child alone"""
SENDS = {"SendMessage", "SendStreamingMessage", "message/send", "message/stream"}
FOLLOWS = {"GetTask", "SubscribeToTask", "CancelTask", "tasks/get", "tasks/resubscribe", "tasks/cancel"}
PIECES = {
    "statusUpdate": "status",
    "artifactUpdate": "artifact",
    "status-update": "status",
    "artifact-update": "artifact",
    "task": "task",
    "message": "message",
}
"""what a result calls what it holds, by its member (1.0) or its kind (0.3)"""
ENDS: dict[str, tuple[ToolStatus, str]] = {
    "completed": ("ok", "completed"),
    "failed": ("error", "failed"),
    "rejected": ("error", "failed"),
    "canceled": ("cancelled", "aborted"),
}
"""state in which a task ends -> (how the call ended, how the child did)"""
TURNS = {"input-required", "auth-required"}
"""states in which the client has to speak"""
T = TypeVar("T")


@dataclass(slots=True)
class Child:
    """The session of what was delegated. It is told nothing more once it is over."""

    owner: Owner
    over: bool = False

    def observe(self, origin: str, content: str, now: int) -> Iterator[ChildEvent]:
        """What passed between the two, as it sees it."""
        if not self.over:
            event = post_body(
                ObservationIn, content=content, media_type="application/json", origin=f"a2a:{origin}", event_time=now
            )
            yield ChildEvent(self.owner, event)

    def end(self, status: str) -> Iterator[ChildEvent]:
        """There is no more to do."""
        if not self.over:
            self.over = True
            yield ChildEvent(self.owner, {"kind": "end", "status": status})


@dataclass(slots=True)
class Delegation:
    """A message that is on its way, or whose task goes on. `at`: micros; `goes_on`: it is said to a task that was
    there before; `sender`: the exchange that it was sent in; `reader`: the one that tells what its task says."""

    call_id: str
    at: int
    child: Child | None
    sender: object
    task: str | None
    context: str | None
    goes_on: bool
    has_answer: bool = False
    status: msgspec.Raw | None = None
    artifacts: OrderedDict[str, list[msgspec.Raw]] = field(default_factory=OrderedDict)
    size: int = 0
    """bytes of artifacts"""
    left_out: Counter[str] = field(default_factory=Counter)
    """bytes by artifact"""
    over: bool = False
    reader: object = None


class TaskPiece(NamedTuple):
    """What a server said: `kind` is task, message, status or artifact."""

    kind: str
    raw: msgspec.Raw
    members: Message


class Delegations:
    """Those of one session to one agent, which is called `agent`."""

    def __init__(self, agent: str, new_id: Callable[[], str]) -> None:
        self.agent = agent
        self.new_id = new_id
        self.running: OrderedDict[str, Delegation] = OrderedDict()
        """by task"""
        self.turns: OrderedDict[str, Child] = OrderedDict()
        """the child of each task that waits for input"""

    def child_of(self, task: str | None) -> Child | None:
        """Of a task that was begun before."""
        running = self.running.get(task or "")
        return running.child if running is not None else self.turns.get(task or "")

    def follow(self, delegation: Delegation) -> None:
        """Its task goes on, whatever becomes of the answer that named it."""
        if delegation.task is not None:
            keep(self.running, delegation.task, delegation)


def keep(entries: OrderedDict[str, T], name: str, value: T) -> None:
    """Keep the newest."""
    entries[name] = value
    entries.move_to_end(name)
    while len(entries) > MOST:
        entries.popitem(last=False)


class DelegationExchange(ConversationFold):
    """One HTTP request and its answer. `path_method`: the method of JSON-RPC that a path of HTTP+JSON stands for, with
    its task; None where requests name their own."""

    def __init__(self, delegations: Delegations, path_method: tuple[str, str | None] | None = None) -> None:
        self._all = delegations
        self._path = path_method
        self._asked: dict[Hashable | None, Delegation] = {}
        self._call_id = ""
        self._child: Child | None = None

    @property
    def by_path(self) -> bool:
        """Whether its path says what is asked."""
        return self._path is not None

    def begins(self, message: Message) -> str | None:
        """The call that this message will be, if it begins work of its own: a child may be given for it."""
        method, params = self._method(message)
        if method not in SENDS or "message" not in params:
            return None
        if self._all.child_of(_text(jsonrpc.members(params, "message"), "taskId")) is not None:
            return None
        self._call_id = self._all.new_id()
        return self._call_id

    def give(self, child: Owner | None) -> None:
        """The child of the message that is read next."""
        self._child = None if child is None else Child(child)

    def from_client(self, message: Message, now: int, traceparent: str | None = None) -> Iterator[Event | ChildEvent]:
        """The client said this."""
        method, params = self._method(message)
        id = None if self._path else jsonrpc.id_of(message)
        if method in SENDS and "message" in params:
            yield from self._begin_call(id, params, now, traceparent)
        elif method in FOLLOWS:
            task = self._path[1] if self._path else _text(params, "id")
            delegation = self._all.running.get(task or "")
            if delegation is not None:
                self._asked[id] = delegation
                if method in ("SubscribeToTask", "tasks/resubscribe"):
                    delegation.reader = self

    def from_server(self, message: Message, now: int) -> Iterator[Event | ChildEvent]:
        """The server said this."""
        id = None if self._path else jsonrpc.id_of(message)
        delegation = self._asked.get(id)
        if delegation is None or delegation.over:
            return
        if self._path is None and "error" in message and bytes(message["error"]) != b"null":
            yield from self._refuse(delegation, jsonrpc.text(message["error"]), now)
            return
        piece = read(message if self._path else jsonrpc.members(message, "result"))
        if piece is None:
            return
        delegation.has_answer = True
        _name(delegation, piece)
        self._all.follow(delegation)
        if delegation.reader in (None, self):
            _take_in(delegation, piece)
            if delegation.child is not None:
                # A message from the client is a "message" of the child: this one is its reply.
                origin = "reply" if piece.kind == "message" else piece.kind
                yield from delegation.child.observe(origin, jsonrpc.text(piece.raw), now)
        yield from self._settle(delegation, piece, now)

    def broken_off(
        self, ids: Iterable[Hashable | None], status: ToolStatus, why: str, now: int
    ) -> Iterator[Event | ChildEvent]:
        """No answer comes to these requests. A task that its server has told of goes on without it."""
        for id in [None] if self._path else ids:
            delegation = self._asked.pop(id, None)
            if delegation is None or delegation.over:
                continue
            if delegation.reader is self:
                delegation.reader = None
            if delegation.sender is self and not delegation.has_answer:
                yield from self._fail(delegation, status, why, now)

    def _method(self, message: Message) -> tuple[str | None, Message]:
        if self._path is not None:
            return self._path[0], message
        method = jsonrpc.member(message, "method")
        return (method if isinstance(method, str) else None), jsonrpc.members(message, "params")

    def _begin_call(
        self, id: Hashable | None, params: Message, now: int, traceparent: str | None
    ) -> Iterator[Event | ChildEvent]:
        details = jsonrpc.members(params, "message")
        task = _text(details, "taskId")
        child, self._child = self._all.child_of(task) or self._child, None
        call_id, self._call_id = self._call_id or self._all.new_id(), ""
        goes_on = child is not None and self._all.child_of(task) is child
        self._all.turns.pop(task or "", None)
        delegation = Delegation(call_id, now, child, self, task, _text(details, "contextId"), goes_on, reader=self)
        self._asked[id] = delegation
        text = jsonrpc.text(params["message"])
        yield post_body(
            ToolCallIn,
            call_id=call_id,
            name=self._all.agent,
            arguments=text,
            server=self._all.agent,
            traceparent=traceparent,
            event_time=now,
        )
        if child is not None:
            yield from child.observe("message", text, now)

    def _refuse(self, delegation: Delegation, error: str, now: int) -> Iterator[Event | ChildEvent]:
        """An error is the end of a message; a task that is asked for goes on."""
        if delegation.sender is self:
            yield from self._fail(delegation, "error", error, now)

    def _fail(self, delegation: Delegation, status: ToolStatus, why: str, now: int) -> Iterator[Event | ChildEvent]:
        """Without an answer."""
        child_status: str | None = "aborted" if status == "cancelled" else "failed"
        if delegation.child is not None:
            yield from delegation.child.observe("reply", why, now)
        if delegation.goes_on and delegation.task is not None and delegation.child is not None:
            keep(self._all.turns, delegation.task, delegation.child)  # the task is where it was
            child_status = None
        yield from self._over(delegation, status, why, child_status, now)

    def _settle(self, delegation: Delegation, piece: TaskPiece, now: int) -> Iterator[Event | ChildEvent]:
        """What this piece ends."""
        if piece.kind == "message":
            yield from self._over(delegation, "ok", jsonrpc.text(piece.raw), "completed", now)
            return
        state = _state(piece.members) if piece.kind in ("task", "status") else ""
        if state in ENDS:
            status, child_status = ENDS[state]
            yield from self._over(delegation, status, _result(delegation), child_status, now)
        elif state in TURNS:
            if delegation.task is not None and delegation.child is not None:
                keep(self._all.turns, delegation.task, delegation.child)
            yield from self._over(delegation, "ok", _result(delegation), None, now)

    def _over(
        self, delegation: Delegation, status: ToolStatus, content: str, child_status: str | None, now: int
    ) -> Iterator[Event | ChildEvent]:
        delegation.over = True
        if delegation.task is not None and self._all.running.get(delegation.task) is delegation:
            del self._all.running[delegation.task]
        yield post_body(
            ToolResultIn,
            call_id=delegation.call_id,
            name=self._all.agent,
            status=status,
            content=content,
            latency_us=max(0, now - delegation.at),
            event_time=now,
        )
        if delegation.child is not None and child_status is not None:
            yield from delegation.child.end(child_status)


def read(result: Message) -> TaskPiece | None:
    """What a result holds, in either version; None for what is no piece of a task."""
    for name in ("task", "message", "statusUpdate", "artifactUpdate"):
        if name in result:
            return TaskPiece(PIECES[name], result[name], jsonrpc.members(result, name))
    kind = PIECES.get(_text(result, "kind") or ("task" if "status" in result and "id" in result else ""))
    return None if kind is None else TaskPiece(kind, msgspec.Raw(msgspec.json.encode(result)), result)


def _name(delegation: Delegation, piece: TaskPiece) -> None:
    """Take over what the server calls the task."""
    if piece.kind == "task":
        delegation.task = _text(piece.members, "id") or delegation.task
    elif piece.kind != "message":
        delegation.task = _text(piece.members, "taskId") or delegation.task
    delegation.context = _text(piece.members, "contextId") or delegation.context


def _take_in(delegation: Delegation, piece: TaskPiece) -> None:
    """Keep what the result will repeat: the last status, and of each artifact the whole that came last with all that
    was appended to it."""
    if piece.kind in ("task", "status") and "status" in piece.members:
        delegation.status = piece.members["status"].copy()
    if piece.kind == "task":
        delegation.artifacts.clear()
        delegation.left_out.clear()
        delegation.size = 0
        for artifact in _list(piece.members, "artifacts"):
            _add(delegation, artifact, is_whole=True)
    elif piece.kind == "artifact" and (only := piece.members.get("artifact")) is not None:
        _add(delegation, only, is_whole=jsonrpc.member(piece.members, "append") is not True)


def _add(delegation: Delegation, artifact: msgspec.Raw, *, is_whole: bool) -> None:
    name = _text(jsonrpc.members({"artifact": artifact}, "artifact"), "artifactId") or ""
    if is_whole:
        delegation.size -= sum(len(bytes(piece)) for piece in delegation.artifacts.pop(name, []))
        delegation.left_out.pop(name, None)
    size = len(bytes(artifact))
    if delegation.size + size > ARTIFACT_BYTES:
        delegation.left_out[name] += size
        return
    delegation.size += size
    # A copy: it is a view of everything that was read with it.
    delegation.artifacts.setdefault(name, []).append(artifact.copy())


def _result(delegation: Delegation) -> str:
    """What the delegation came to, as JSON: the task's ids, its last status, its artifacts piece by piece."""
    outcome: dict[str, object] = {
        "taskId": delegation.task,
        "contextId": delegation.context,
        "status": delegation.status,
    }
    outcome["artifacts"] = [piece for pieces in delegation.artifacts.values() for piece in pieces]
    if delegation.left_out:
        outcome["left_out"] = {"bytes": delegation.left_out.total()}
    return msgspec.json.encode(outcome).decode(errors="replace")


def _state(members: Message) -> str:
    """Of a task or an update, in the words of 0.3."""
    state = _text(jsonrpc.members(members, "status"), "state") or ""
    return state.lower().removeprefix("task_state_").replace("_", "-")


def _text(message: Message, name: str) -> str | None:
    """A name; None for none, and for what is too long to be one."""
    value = jsonrpc.member(message, name)
    if not isinstance(value, str) or not 0 < len(value.encode(errors="replace")) <= bounds.NAME_BYTES:
        return None
    return value


def _list(message: Message, name: str) -> list[msgspec.Raw]:
    try:
        return msgspec.json.decode(message[name], type=list[msgspec.Raw])
    except (KeyError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
