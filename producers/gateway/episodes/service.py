"""Sessions over HTTP: start, events, reward, end. What the client library and the rollout workers speak.

Invariants: starting with an attempt that is already running gives that session again; a reward with an id that its
source already used, and ending twice, change nothing; a reward may come after the end; `check_source` says who may
give one."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TypeVar, cast

import msgspec
import orjson

from millrace.dialects import shape
from millrace.dialects.errors import ApiError, bad_request, not_held
from millrace.infra.process.offload import Step, aside, by_turns
from millrace.producers.gateway.calls.gateway import CallInSession, Gateway
from millrace.producers.gateway.episodes.bodies import (
    ACTORS,
    EndIn,
    EventsIn,
    FeedbackIn,
    RewardIn,
    StartIn,
    ToolCallIn,
)
from millrace.producers.gateway.http.callers import Caller
from millrace.producers.gateway.marks import marked_id
from millrace.producers.gateway.sessions.ownership import USER, Hints, hints
from millrace.producers.gateway.sessions.recorder import log_full
from millrace.producers.gateway.sessions.replies import SeveralReplies
from millrace.producers.gateway.sessions.session import GatewaySession, RewardKey
from millrace.producers.gateway.sessions.sessions import REPORT
from millrace.producers.gateway.sessions.tool_asks import ToolAsk
from millrace.schemas import bounds
from millrace.schemas.ids import new_id, now_micros
from millrace.schemas.records import EpisodeStarted, Reward, Versions

AT_ONCE = 16
"""events that are recorded in one go"""
LONGEST_GROUP = 200
"""bytes; a group's name is part of the Kafka key and of the headers of each of its events"""

NOT_JOINED: Mapping[str, str | None] = {"join": None, "asked_id": None}

T = TypeVar("T")
SELF = "agent"
"""the one source of a session's own key: what an agent says of itself"""


async def _read(kind: type[T], body: bytes) -> T:
    """The body as `kind`. Raises ApiError 400 and 413."""
    if len(body) > bounds.REPORT_BYTES:
        raise ApiError(
            413,
            f"A request about a session has at most {bounds.REPORT_BYTES} bytes, not {len(body)}: report less at once",
            code="request_too_large",
        )
    return await aside(len(body), _decoded, kind, body)


def _decoded(kind: type[T], body: bytes) -> T:
    shape.check(body)
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise shape.json_refusal(body, error) from None


def _group(wanted: StartIn) -> str | None:
    """The group that a start names. A number belongs to the ticket of that number, and to nobody else."""
    own = None if wanted.ticket is None else str(wanted.ticket)
    group = wanted.group or own
    if group and group != own and group.isascii() and group.isdigit():
        raise bad_request(f"group: numbers are the groups of tickets: choose a name, as case-{group}", param="group")
    return group


class Episodes:
    """The session routes of one gateway. Every method raises ApiError."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    def find(self, caller: Caller, id: str) -> GatewaySession:
        """The session that a caller may reward."""
        session = self.gateway.sessions.get(id)
        if caller.session is not None and caller.session.id != id:
            raise ApiError(403, "This key belongs to another session", code="wrong_session")
        if session is None or session.tenant != caller.tenant:
            raise ApiError(404, f"There is no session {id} here", code="session_not_found")
        if caller.speaks_in(session):
            session.touch()
        return session

    def judged(self, caller: Caller, name: str, headers: Mapping[str, str]) -> GatewaySession:
        """The session that a caller may reward, by its id or by the name that its calls gave it: the newest of that
        name and of the end user that the headers name. The name of another tenant's session is one that nobody gave."""
        said = hints({USER: headers.get(USER, "")}, name=name)
        return self.find(caller, self._id(caller, said))

    def _id(self, caller: Caller, said: Hints) -> str:
        """The id of the session that a caller means; for a name that nobody gave, the name."""
        name, sessions = said.name or "", self.gateway.sessions
        session = sessions.get(name)
        if session is None or session.tenant != caller.tenant:
            session = sessions.newest(caller.tenant, said)
        return name if session is None else session.id

    def of_name(self, caller: Caller, name: str | None) -> list[dict[str, str | bool]]:
        """The sessions that bear a name, the newest last, and whether they go on."""
        if caller.session is not None:
            raise ApiError(403, "A session's own key asks for no others: use a configured key", code="not_granted")
        if not name:
            raise bad_request("name: which? GET /v1/sessions?name=NAME", param="name")
        found = self.gateway.sessions.of_name(caller.tenant, name)
        return [{"session": one.id, "live": not one.ended} for one in found]

    def own(self, caller: Caller, id: str) -> GatewaySession:
        """The session that a caller may add to and end."""
        session = self.find(caller, id)
        caller.check_speaks_in(session)
        return session

    async def start(self, caller: Caller, body: bytes, base_url: str, *, held: bool = False) -> dict[str, str]:
        """Begin a session; returns its id, key and base URL. `held`: only one whose attempt runs here, or whose parent
        does."""
        wanted = await _read(StartIn, body)
        if caller.session is not None:
            # Its holder is the agent under training: it must not fill groups, take grants or grow its own tree.
            raise ApiError(403, "A session's own key starts no sessions: use a configured key", code="not_granted")
        if wanted.ticket is not None and not caller.granted:
            which = "the one that [rollout] key names, else the one in home/keys/workers"
            raise ApiError(403, f"Only the key of rollout workers may take a grant: {which}", code="not_granted")
        session = self._running(caller, wanted)
        if session is None:
            if held and wanted.parent is None:
                raise not_held()
            self.gateway.admit(caller.tenant)
            session = self._made(caller, wanted)
            self.gateway.begin(session)
            if not session.whole:
                self.gateway.sessions.retire(session)
                raise log_full()
            await self.gateway.recorder.durable(session)
        return {"session": session.id, "api_key": self.gateway.sessions.key_of(session), "base_url": base_url}

    async def reward(self, caller: Caller, session: GatewaySession, body: bytes) -> dict[str, str]:
        """Record a reward; returns its id."""
        return await self._judged(caller, session, await _read(RewardIn, body))

    async def feedback(self, caller: Caller, body: bytes) -> dict[str, str]:
        """Record what a user said of a reply or of a session; returns the reward's id and the session's."""
        given = await _read(FeedbackIn, body)
        try:
            reward = given.reward()
        except ValueError as error:
            raise bad_request(str(error)) from None
        session = self._of(caller, given)
        return {**await self._judged(caller, session, reward), "session": session.id}

    def _of(self, caller: Caller, given: FeedbackIn) -> GatewaySession:
        """The session that feedback is about."""
        sessions = self.gateway.sessions
        if given.session is not None:
            return self.find(caller, self._id(caller, hints({}, given.user, name=given.session)))
        if given.response_id is None:
            raise bad_request("feedback names a reply (response_id) or a session", param="response_id")
        try:
            id = sessions.replies.find(caller.tenant, given.response_id)
        except SeveralReplies:
            raise ApiError(
                409,
                f"Several sessions have a reply {given.response_id}: name the session too",
                code="ambiguous_reply",
                param="session",
            ) from None
        if id is None:
            raise ApiError(404, f"There is no reply {given.response_id} here", code="reply_not_found")
        return self.find(caller, id)

    async def _judged(self, caller: Caller, session: GatewaySession, given: RewardIn) -> dict[str, str]:
        if given.span_start is not None and given.span_end is not None and given.span_end < given.span_start:
            raise bad_request("span_end is before span_start", param="span_end")
        own_key = caller.session is not None
        root = self.gateway.sessions.get(session.root)
        awaits = [SELF] if root is None else root.start["awaits"]
        reserved = caller.barred(self.gateway.options.terms(session.policy).reserved)
        check_source(given.source, own_key=own_key, awaits=awaits, reserved=reserved)
        id = given.reward_id or new_id()
        kind, target = given.target_kind, given.target
        if given.response_id is not None:
            kind, target = kind or "turn", target or given.response_id
        known = RewardKey(given.source, id)
        if known not in session.rewards:
            check_room((key.source for key in session.rewards), given.source, awaits)
            reward: Reward = {
                "reward_id": id,
                "target_kind": kind or "trajectory",
                "target": target or session.id,
                "span_start": given.span_start,
                "span_end": given.span_end,
                "source": given.source,
                "source_version": given.source_version,
                "rubric_version": given.rubric_version,
                "value": given.value,
                "components": given.components,
                "label": given.label,
                "failure": given.failure,
                "critique": given.critique,
                "supersedes": given.supersedes,
                "independent": given.independent,
                "observed_at": now_micros(),
                "signal": given.signal,
                "confidence": given.confidence,
                "replay": None,
            }
            if self.gateway.recorder.accept(session, "reward", reward, actor="evaluator") is None:
                raise ApiError(500, "The reward cannot be recorded", type="server_error", code="not_recordable")
            session.rewards.add(known)
        # A repetition too: the first may still be on its way to the disk.
        await self.gateway.recorder.durable(session)
        return {"reward_id": id}

    async def events(self, session: GatewaySession, body: bytes) -> dict[str, list[str | None]]:
        """Record what the agent did and saw; returns the ids of the events: null for a repetition, and where the log
        was full. A report with a source may be sent again, so a full log refuses the rest of it (503)."""
        report = await _read(EventsIn, body)
        if session.ended:
            raise ApiError(403, f"Session {session.id} has ended", code="session_ended")
        _check_numbers(session, report)
        ids: list[str | None] = []
        records = self._events(session, report, ids)
        with CallInSession(session, new_id()):
            await by_turns(records)
        await self.gateway.recorder.durable(session)
        return {"ids": ids}

    def _events(self, session: GatewaySession, report: EventsIn, ids: list[str | None]) -> Iterator[Step]:
        """Record events, a few at a time; nothing happens between the last of them and the end. Raises ApiError 503."""
        recorder = self.gateway.recorder
        for at, event in enumerate(report.events):
            if at and at % AT_ONCE == 0:
                yield None
            fields = msgspec.to_builtins(event)
            kind = fields.pop("kind")  # the tag says which record it is, and is no field of it
            when, seq, source = fields.pop("event_time"), fields.pop("seq"), report.source
            # Looked at here, since the same report may be on its way twice.
            if source is not None and seq < session.reported.get(source, 0):
                ids.append(None)
                continue
            ask, actor = None, ACTORS[type(event)]
            if isinstance(event, ToolCallIn):
                said, ask = _joined(session, event, when or now_micros()) if fields.pop("join") else (NOT_JOINED, None)
                fields |= said
            if source is None:
                ids.append(recorder.record(session, kind, fields, actor=actor, event_time=when))
            else:
                notes = {REPORT: f"{source} {seq}"}
                ids.append(recorder.accept(session, kind, fields, actor=actor, event_time=when, notes=notes))
                session.reported[source] = seq + 1
            if ids[-1] is not None:
                session.asks.settled(ask)

    async def end(self, session: GatewaySession, body: bytes) -> dict[str, str | bool]:
        """End a session."""
        given = await _read(EndIn, body)
        await self.gateway.end(
            session,
            status=given.status,
            stop_condition=given.stop_condition,
            output=given.output,
            reason=given.reason,
        )
        return {"session": session.id, "ended": True}

    def _running(self, caller: Caller, wanted: StartIn) -> GatewaySession | None:
        """The live session of the same attempt: its start was answered, but the answer was lost."""
        if wanted.attempt is None:
            return None
        found = self.gateway.sessions.attempted(caller.tenant, wanted.attempt)
        if found is not None and found.start["sample"] == wanted.sample and found.start["ticket"] == wanted.ticket:
            return found
        return None

    def _made(self, caller: Caller, wanted: StartIn) -> GatewaySession:
        id = marked_id(self.gateway.sessions.index)
        parent = None if wanted.parent is None else self.own(caller, wanted.parent)
        group = _group(wanted) or id
        for what, bad in (
            ("sample", wanted.sample >= wanted.group_size),
            ("group", len(group.encode()) > LONGEST_GROUP),
        ):
            if bad:
                raise bad_request(f"{what} is out of range", param=what)
        policy = self._policy(wanted.policy) if parent is None else parent.policy
        terms = self.gateway.options.terms(policy)
        awaits = list(terms.awaits) if wanted.awaits is None else wanted.awaits
        deadline_ms = terms.reward_deadline_ms if wanted.reward_deadline_ms is None else wanted.reward_deadline_ms
        start: EpisodeStarted = {
            "task_id": wanted.task_id or id,
            "task": "" if wanted.task is None else _text(wanted.task),
            "ticket": wanted.ticket,
            "group_size": wanted.group_size,
            "sample": wanted.sample,
            "min_version": wanted.min_version,
            "deadline": wanted.deadline,
            "awaits": awaits,
            "reward_deadline_ms": deadline_ms,
            "mode": wanted.mode,
            "versions": cast(Versions, msgspec.structs.asdict(wanted.versions)),
            "replay": wanted.replay,
            "budget": {str(name): most for name, most in wanted.budget.items()},
        }
        return GatewaySession(
            id=id,
            tenant=caller.tenant,
            policy=policy,
            group=group if parent is None else parent.group,
            root=id if parent is None else parent.root,
            attempt=(wanted.attempt or id) if parent is None else parent.attempt,
            split=wanted.split if parent is None else parent.split,
            start=start if parent is None else {**parent.start, "task": "", "awaits": []},
            parent=wanted.parent,
            spawn_call=wanted.spawn_call,
            payer=caller.key,
            defaults=wanted.sampling.named(),
        )

    def _policy(self, named: str | None) -> str:
        """The policy that a start names; the gateway's own where it names none."""
        known = self.gateway.policies
        if named is None:
            return self.gateway.options.policy
        if named not in known:
            said = f"No policy {named!r} is served here; served are {', '.join(known)}"
            raise ApiError(404, said, param="policy", code="policy_not_found")
        return named


def _check_numbers(session: GatewaySession, report: EventsIn) -> None:
    """Raises ApiError 400 for events whose numbers do not say what is a repetition."""
    seqs, source = [event.seq for event in report.events], report.source
    if source is None:
        if any(seq is not None for seq in seqs):
            raise bad_request("seq: a number belongs to a source: name it beside the events", param="source")
        return
    if None in seqs or any(after <= before for before, after in pairwise(cast(list[int], seqs))):
        raise bad_request("seq: the events of a source have numbers that rise", param="seq")
    if source not in session.reported and len(session.reported) >= bounds.NAMES:
        raise bad_request(f"source: a session has at most {bounds.NAMES} sources of reports", param="source")


def _joined(session: GatewaySession, call: ToolCallIn, at: int) -> tuple[dict[str, str | None], ToolAsk | None]:
    """What is known of the model's call behind one that was seen on its way to the tool, and its ask."""
    found = session.asks.join(call.name, call.arguments, at)
    asked = found.ask.id or None if found.ask else None
    return {"join": found.join, "asked_id": asked, "response_id": call.response_id or found.response}, found.ask


def _text(value: object) -> str:
    """JSON text of what a client sent."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # an integer of more than 64 bits
        return json.dumps(value, ensure_ascii=False)


def check_source(source: str, *, own_key: bool, awaits: Collection[str], reserved: Collection[str]) -> None:
    """Raises ApiError 403 for a source that the caller may not speak for.

    A session's own key, which the agent under training holds, speaks for `agent` alone, and not even for that where the
    episode awaits it; a static key speaks for every source but those of deployed verifiers, which its entry in
    `[gateway.keys]` must name as `judges`, and so does everyone where the gateway asks for no keys; the workers' key
    speaks for all.

    own_key: whether the caller holds the session's own key. awaits: the sources that the episode waits for. reserved:
    sources of verifiers that the caller does not judge for."""
    if own_key and (source != SELF or source in awaits):
        raise ApiError(
            403,
            f"A session's own key cannot speak for {source!r}: it may say what the agent thinks of itself (source "
            f"{SELF!r}, where nobody waits for that). Send rewards of other sources with a key of [gateway.keys]",
            code="wrong_source",
            param="source",
        )
    if not own_key and source in reserved:
        raise ApiError(
            403,
            f"This caller cannot speak for {source!r}, a verifier of this deployment: send a key that names it under "
            "`judges` in [gateway.keys], or use another source",
            code="wrong_source",
            param="source",
        )


def check_room(known: Iterable[str], source: str, awaits: Collection[str]) -> None:
    """Raises ApiError 400 where an episode keeps no more rewards of such a source.

    known: the sources of those that it has. Awaited sources and others have room of their own, as where episodes are
    sealed, so that nobody fills the room of those who are awaited."""
    count = sum((other in awaits) == (source in awaits) for other in known)
    if count >= bounds.REWARDS:
        which = "of those that it awaits" if source in awaits else "of sources that it does not await"
        raise bad_request(f"This episode has {count} rewards {which} and keeps no more", code="too_many_rewards")
