"""Sessions over HTTP: start, events, reward, end. What the client library and the rollout workers speak.

Invariants: starting with an attempt that is already running gives that session again; a reward with an id that is
already recorded, and ending twice, change nothing; a reward may come after the end."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import orjson

from producers.gateway.bodies import ACTORS, EndIn, EventsIn, RewardIn, StartIn
from producers.gateway.errors import ApiError, bad_request
from producers.gateway.gateway import Caller, Gateway
from producers.gateway.session import Session
from schemas.ids import new_id, now_micros

LONGEST_GROUP = 200
"""bytes; a group's name is part of the Kafka key and of the headers of each of its events"""

T = TypeVar("T")


def _read(kind: type[T], body: bytes) -> T:
    """The body as `kind`. Raises ApiError 400."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(str(error)) from None


class Episodes:
    """The session routes of one gateway. Every method raises ApiError."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    def find(self, caller: Caller, id: str) -> Session:
        """The session that a caller may touch."""
        session = self.gateway.sessions.get(id)
        if caller.session is not None and caller.session.id != id:
            raise ApiError(403, "This key belongs to another session", code="wrong_session")
        if session is None or session.tenant != caller.tenant:
            raise ApiError(404, f"There is no session {id} here", code="session_not_found")
        session.touch()
        return session

    async def start(self, caller: Caller, body: bytes, base_url: str) -> dict[str, Any]:
        """Begin a session; returns its id, key and base URL."""
        wanted = _read(StartIn, body)
        session = self._running(caller, wanted)
        if session is None:
            session = self._made(caller, wanted)
            self.gateway.begin(session)
            if not session.whole:
                self.gateway.sessions.retire(session)
                raise ApiError(503, "The capture log is full: try again later", type="server_error", code="log_full")
            await self.gateway.recorder.log.durable()
        return {"session": session.id, "api_key": self.gateway.sessions.key_of(session), "base_url": base_url}

    async def reward(self, session: Session, body: bytes) -> dict[str, Any]:
        """Record a reward; returns its id."""
        given = _read(RewardIn, body)
        id = given.reward_id or new_id()
        kind, target = given.target_kind, given.target
        if given.response_id is not None:
            kind, target = kind or "turn", target or given.response_id
        if id not in session.rewards:
            fields = {name: getattr(given, name) for name in RewardIn.__struct_fields__ if name != "response_id"}
            reward = {
                **fields,
                "reward_id": id,
                "target_kind": kind or "trajectory",
                "target": target or session.id,
                "observed_at": now_micros(),
            }
            self.gateway.recorder.record(session, "reward", reward, actor="evaluator")
            session.rewards.add(id)
            await self.gateway.recorder.log.durable()
        return {"reward_id": id}

    async def events(self, session: Session, body: bytes) -> dict[str, Any]:
        """Record what the agent did and saw; returns the ids of the events (null where the log was full)."""
        given = _read(EventsIn, body).events
        if session.ended:
            raise ApiError(403, f"Session {session.id} has ended", code="session_ended")
        ids = []
        for event in given:
            fields = msgspec.to_builtins(event)
            kind = type(event).__struct_config__.tag
            ids.append(self.gateway.recorder.record(session, str(kind), fields, actor=ACTORS[type(event)]))
        await self.gateway.recorder.log.durable()
        return {"ids": ids}

    async def end(self, session: Session, body: bytes) -> dict[str, Any]:
        """End a session."""
        given = _read(EndIn, body)
        await self.gateway.end(
            session,
            status=given.status,
            stop_condition=given.stop_condition,
            output=given.output,
            reason=given.reason,
        )
        return {"session": session.id, "ended": True}

    def _running(self, caller: Caller, wanted: StartIn) -> Session | None:
        """The live session of the same attempt: its start was answered, but the answer was lost."""
        if wanted.attempt is None:
            return None
        found = self.gateway.sessions.attempted(caller.tenant, wanted.attempt)
        if found is not None and found.start["sample"] == wanted.sample and found.start["ticket"] == wanted.ticket:
            return found
        return None

    def _made(self, caller: Caller, wanted: StartIn) -> Session:
        options, id = self.gateway.options, new_id()
        if wanted.ticket is not None and not caller.granted:
            raise ApiError(403, "Only the key of rollout workers may take a grant", code="not_granted")
        parent = None if wanted.parent is None else self.find(Caller(caller.tenant, None), wanted.parent)
        group = wanted.group or (str(wanted.ticket) if wanted.ticket is not None else id)
        for what, bad in (
            ("group_size", wanted.group_size < 1),
            ("sample", not 0 <= wanted.sample < wanted.group_size),
            ("min_version", wanted.min_version < 0),
            ("ticket", wanted.ticket is not None and wanted.ticket < 0),
            ("group", len(group.encode()) > LONGEST_GROUP),
        ):
            if bad:
                raise bad_request(f"{what} is out of range", param=what)
        awaits = list(options.awaits) if wanted.awaits is None else wanted.awaits
        deadline_ms = options.reward_deadline_ms if wanted.reward_deadline_ms is None else wanted.reward_deadline_ms
        start = {
            "task_id": wanted.task_id or id,
            "task": "" if wanted.task is None else orjson.dumps(wanted.task).decode(),
            "ticket": wanted.ticket,
            "group_size": wanted.group_size,
            "sample": wanted.sample,
            "min_version": wanted.min_version,
            "deadline": wanted.deadline,
            "awaits": awaits,
            "reward_deadline_ms": deadline_ms,
            "mode": wanted.mode,
            "versions": msgspec.structs.asdict(wanted.versions),
            "replay": wanted.replay,
            "budget": wanted.budget,
        }
        return Session(
            id=id,
            tenant=caller.tenant,
            policy=options.policy,
            group=group if parent is None else parent.group,
            root=id if parent is None else parent.root,
            attempt=(wanted.attempt or id) if parent is None else parent.attempt,
            split=wanted.split if parent is None else parent.split,
            start=start if parent is None else {**parent.start, "task": "", "awaits": []},
            parent=wanted.parent,
            spawn_call=wanted.spawn_call,
            defaults=dict(wanted.sampling),
        )
