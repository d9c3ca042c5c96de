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
from millrace.dialects.errors import ApiError, bad_request, not_held_error
from millrace.infra.process.offload import Step, by_turns, run_aside
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
from millrace.producers.gateway.sessions.reply_index import SeveralReplies
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

NO_JOIN: Mapping[str, str | None] = {"join": None, "asked_id": None}

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
    return await run_aside(len(body), _decode, kind, body)


def _decode(kind: type[T], body: bytes) -> T:
    shape.check(body)
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise shape.json_refusal(body, error) from None


def _group(start_in: StartIn) -> str | None:
    """The group that a start names. A number belongs to the ticket of that number, and to nobody else."""
    ticket_group = None if start_in.ticket is None else str(start_in.ticket)
    group = start_in.group or ticket_group
    if group and group != ticket_group and group.isascii() and group.isdigit():
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

    def find_for_reward(self, caller: Caller, name: str, headers: Mapping[str, str]) -> GatewaySession:
        """The session that a caller may reward, by its id or by the name that its calls gave it: the newest of that
        name and of the end user that the headers name. The name of another tenant's session is one that nobody gave."""
        names = hints({USER: headers.get(USER, "")}, name=name)
        return self.find(caller, self._id(caller, names))

    def _id(self, caller: Caller, names: Hints) -> str:
        """The id of the session that a caller means; for a name that nobody gave, the name."""
        name, sessions = names.name or "", self.gateway.sessions
        session = sessions.get(name)
        if session is None or session.tenant != caller.tenant:
            session = sessions.newest(caller.tenant, names)
        return name if session is None else session.id

    def of_name(self, caller: Caller, name: str | None) -> list[dict[str, str | bool]]:
        """The sessions that bear a name, the newest last, and whether they go on."""
        if caller.session is not None:
            raise ApiError(403, "A session's own key asks for no others: use a configured key", code="not_granted")
        if not name:
            raise bad_request("name: which? GET /v1/sessions?name=NAME", param="name")
        sessions = self.gateway.sessions.of_name(caller.tenant, name)
        return [{"session": one.id, "live": not one.has_ended} for one in sessions]

    def find_own(self, caller: Caller, id: str) -> GatewaySession:
        """The session that a caller may add to and end."""
        session = self.find(caller, id)
        caller.check_speaks_in(session)
        return session

    async def start(self, caller: Caller, body: bytes, base_url: str, *, must_exist: bool = False) -> dict[str, str]:
        """Begin a session; returns its id, key and base URL. `must_exist`: only one whose attempt runs here, or whose
        parent does."""
        start_in = await _read(StartIn, body)
        if caller.session is not None:
            # Its holder is the agent under training: it must not fill groups, take grants or grow its own tree.
            raise ApiError(403, "A session's own key starts no sessions: use a configured key", code="not_granted")
        if start_in.ticket is not None and not caller.takes_grants:
            key_place = "the one that [rollout] key names, else the one in home/keys/workers"
            raise ApiError(403, f"Only the key of rollout workers may take a grant: {key_place}", code="not_granted")
        session = self._running(caller, start_in)
        if session is None:
            if must_exist and start_in.parent is None:
                raise not_held_error()
            self.gateway.matching.admit(caller.tenant)
            session = self._make_session(caller, start_in)
            self.gateway.begin(session)
            if not session.is_whole:
                self.gateway.sessions.retire(session)
                raise log_full()
            await self.gateway.recorder.durable(session)
        return {"session": session.id, "api_key": self.gateway.sessions.key_of(session), "base_url": base_url}

    async def reward(self, caller: Caller, session: GatewaySession, body: bytes) -> dict[str, str]:
        """Record a reward; returns its id."""
        return await self._record_reward(caller, session, await _read(RewardIn, body))

    async def feedback(self, caller: Caller, body: bytes) -> dict[str, str]:
        """Record what a user said of a reply or of a session; returns the reward's id and the session's."""
        feedback_in = await _read(FeedbackIn, body)
        try:
            reward = feedback_in.reward()
        except ValueError as error:
            raise bad_request(str(error)) from None
        session = self._of(caller, feedback_in)
        return {**await self._record_reward(caller, session, reward), "session": session.id}

    def _of(self, caller: Caller, feedback_in: FeedbackIn) -> GatewaySession:
        """The session that feedback is about."""
        sessions = self.gateway.sessions
        if feedback_in.session is not None:
            return self.find(caller, self._id(caller, hints({}, feedback_in.user, name=feedback_in.session)))
        if feedback_in.response_id is None:
            raise bad_request("feedback names a reply (response_id) or a session", param="response_id")
        try:
            id = sessions.replies.givers.find(caller.tenant, feedback_in.response_id)
        except SeveralReplies:
            raise ApiError(
                409,
                f"Several sessions have a reply {feedback_in.response_id}: name the session too",
                code="ambiguous_reply",
                param="session",
            ) from None
        if id is None:
            raise ApiError(404, f"There is no reply {feedback_in.response_id} here", code="reply_not_found")
        return self.find(caller, id)

    async def _record_reward(self, caller: Caller, session: GatewaySession, reward_in: RewardIn) -> dict[str, str]:
        if (
            reward_in.span_start is not None
            and reward_in.span_end is not None
            and reward_in.span_end < reward_in.span_start
        ):
            raise bad_request("span_end is before span_start", param="span_end")
        own_key = caller.session is not None
        root = self.gateway.sessions.get(session.root)
        awaits = [SELF] if root is None else root.start["awaits"]
        barred_sources = caller.barred_sources(self.gateway.options.terms(session.policy).verifiers)
        caller.check_judges(reward_in.source)
        check_source(reward_in.source, own_key=own_key, awaits=awaits, verifiers=barred_sources)
        id = reward_in.reward_id or new_id()
        kind, target = reward_in.target_kind, reward_in.target
        if reward_in.response_id is not None:
            kind, target = kind or "turn", target or reward_in.response_id
        reward_key = RewardKey(reward_in.source, id)
        if reward_key not in session.rewards:
            check_room((key.source for key in session.rewards), reward_in.source, awaits)
            reward: Reward = {
                "reward_id": id,
                "target_kind": kind or "trajectory",
                "target": target or session.id,
                "span_start": reward_in.span_start,
                "span_end": reward_in.span_end,
                "source": reward_in.source,
                "source_version": reward_in.source_version,
                "rubric_version": reward_in.rubric_version,
                "value": reward_in.value,
                "components": reward_in.components,
                "label": reward_in.label,
                "failure": reward_in.failure,
                "critique": reward_in.critique,
                "supersedes": reward_in.supersedes,
                "independent": reward_in.independent,
                "observed_at": now_micros(),
                "signal": reward_in.signal,
                "confidence": reward_in.confidence,
                "replay": None,
            }
            if self.gateway.recorder.accept(session, "reward", reward, actor="evaluator") is None:
                raise ApiError(500, "The reward cannot be recorded", type="server_error", code="not_recordable")
            session.rewards.add(reward_key)
        # A repetition too: the first may still be on its way to the disk.
        await self.gateway.recorder.durable(session)
        return {"reward_id": id}

    async def events(self, session: GatewaySession, body: bytes) -> dict[str, list[str | None]]:
        """Record what the agent did and saw; returns the ids of the events: null for a repetition, and where the log
        was full. A report with a source may be sent again, so a full log refuses the rest of it (503)."""
        report = await _read(EventsIn, body)
        if session.has_ended:
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
            if source is not None and seq < session.report_numbers.get(source, 0):
                ids.append(None)
                continue
            ask, actor = None, ACTORS[type(event)]
            if isinstance(event, ToolCallIn):
                join_fields, ask = (
                    _join_fields(session, event, when or now_micros()) if fields.pop("join") else (NO_JOIN, None)
                )
                fields |= join_fields
            if source is None:
                ids.append(recorder.record(session, kind, fields, actor=actor, event_time=when))
            else:
                notes = {REPORT: f"{source} {seq}"}
                ids.append(recorder.accept(session, kind, fields, actor=actor, event_time=when, notes=notes))
                session.report_numbers[source] = seq + 1
            if ids[-1] is not None:
                session.asks.settle(ask)

    async def end(self, session: GatewaySession, body: bytes) -> dict[str, str | bool]:
        """End a session."""
        end_in = await _read(EndIn, body)
        await self.gateway.end(
            session,
            status=end_in.status,
            stop_condition=end_in.stop_condition,
            output=end_in.output,
            reason=end_in.reason,
        )
        return {"session": session.id, "ended": True}

    def _running(self, caller: Caller, start_in: StartIn) -> GatewaySession | None:
        """The live session of the same attempt: its start was answered, but the answer was lost."""
        if start_in.attempt is None:
            return None
        session = self.gateway.sessions.of_attempt(caller.tenant, start_in.attempt)
        if (
            session is not None
            and session.start["sample"] == start_in.sample
            and session.start["ticket"] == start_in.ticket
        ):
            return session
        return None

    def _make_session(self, caller: Caller, start_in: StartIn) -> GatewaySession:
        id = marked_id(self.gateway.sessions.index)
        parent = None if start_in.parent is None else self.find_own(caller, start_in.parent)
        group = _group(start_in) or id
        for field, is_bad in (
            ("sample", start_in.sample >= start_in.group_size),
            ("group", len(group.encode()) > LONGEST_GROUP),
        ):
            if is_bad:
                raise bad_request(f"{field} is out of range", param=field)
        policy = self._policy(start_in.policy) if parent is None else parent.policy
        terms = self.gateway.options.terms(policy)
        awaits = list(terms.awaits) if start_in.awaits is None else start_in.awaits
        deadline_ms = terms.reward_deadline_ms if start_in.reward_deadline_ms is None else start_in.reward_deadline_ms
        start: EpisodeStarted = {
            "task_id": start_in.task_id or id,
            "task": "" if start_in.task is None else _text(start_in.task),
            "ticket": start_in.ticket,
            "group_size": start_in.group_size,
            "sample": start_in.sample,
            "min_version": start_in.min_version,
            "deadline": start_in.deadline,
            "awaits": awaits,
            "reward_deadline_ms": deadline_ms,
            "mode": start_in.mode,
            "versions": cast(Versions, msgspec.structs.asdict(start_in.versions)),
            "replay": start_in.replay,
            "budget": {str(name): most for name, most in start_in.budget.items()},
        }
        return GatewaySession(
            id=id,
            tenant=caller.tenant,
            policy=policy,
            group=group if parent is None else parent.group,
            root=id if parent is None else parent.root,
            attempt=(start_in.attempt or id) if parent is None else parent.attempt,
            split=start_in.split if parent is None else parent.split,
            start=start if parent is None else {**parent.start, "task": "", "awaits": []},
            parent=start_in.parent,
            spawn_call=start_in.spawn_call,
            payer=caller.key,
            defaults=start_in.sampling.defaults(),
        )

    def _policy(self, name: str | None) -> str:
        """The policy that a start names; the gateway's own where it names none."""
        policies = self.gateway.policies
        if name is None:
            return self.gateway.options.policy
        if name not in policies:
            message = f"No policy {name!r} is served here; served are {', '.join(policies)}"
            raise ApiError(404, message, param="policy", code="policy_not_found")
        return name


def _check_numbers(session: GatewaySession, report: EventsIn) -> None:
    """Raises ApiError 400 for events whose numbers do not say what is a repetition."""
    seqs, source = [event.seq for event in report.events], report.source
    if source is None:
        if any(seq is not None for seq in seqs):
            raise bad_request("seq: a number belongs to a source: name it beside the events", param="source")
        return
    if None in seqs or any(after <= before for before, after in pairwise(cast(list[int], seqs))):
        raise bad_request("seq: the events of a source have numbers that rise", param="seq")
    if source not in session.report_numbers and len(session.report_numbers) >= bounds.NAMES:
        raise bad_request(f"source: a session has at most {bounds.NAMES} sources of reports", param="source")


def _join_fields(session: GatewaySession, call: ToolCallIn, at: int) -> tuple[dict[str, str | None], ToolAsk | None]:
    """What is known of the model's call behind one that was seen on its way to the tool, and its ask."""
    match = session.asks.join(call.name, call.arguments, at)
    asked_id = match.ask.id or None if match.ask else None
    return {"join": match.join, "asked_id": asked_id, "response_id": call.response_id or match.response}, match.ask


def _text(value: object) -> str:
    """JSON text of what a client sent."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # an integer of more than 64 bits
        return json.dumps(value, ensure_ascii=False)


def check_source(source: str, *, own_key: bool, awaits: Collection[str], verifiers: Collection[str]) -> None:
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
    if not own_key and source in verifiers:
        raise ApiError(
            403,
            f"This caller cannot speak for {source!r}, a verifier of this deployment: send a key that names it under "
            "`judges` in [gateway.keys], or use another source",
            code="wrong_source",
            param="source",
        )


def check_room(sources: Iterable[str], source: str, awaits: Collection[str]) -> None:
    """Raises ApiError 400 where an episode keeps no more rewards of such a source.

    sources: the sources of those that it has. Awaited sources and others have room of their own, as where episodes are
    sealed, so that nobody fills the room of those who are awaited."""
    count = sum((one in awaits) == (source in awaits) for one in sources)
    if count >= bounds.REWARDS:
        kind = "of those that it awaits" if source in awaits else "of sources that it does not await"
        raise bad_request(f"This episode has {count} rewards {kind} and keeps no more", code="too_many_rewards")
