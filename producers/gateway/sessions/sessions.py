"""All episodes of one gateway: started ones, unsolicited ones, ended ones that may yet be rewarded.

Invariants: a session's key is derived from its id by a secret of this gateway's folder, or by one that several
gateways are given, so that keys outlive a restart; live sessions are bounded by the idle timeout, those of a name also
by an age and a number of calls, ended ones by a count; a session is rebuilt from the capture log, with the same folds
that built it, and what has ended comes from a `checkpoint` instead where there is one; which session a nameless call
goes on from, `ownership` decides.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from millrace.dialects import match_keys
from millrace.dialects.all import read
from millrace.dialects.rendering.base import Message, Tools
from millrace.dialects.stored_responses import LOCAL_ORIGIN, ORIGIN
from millrace.dialects.template_options import template_options
from millrace.infra import durable, telemetry
from millrace.infra.config.keys import SESSION_KEY
from millrace.infra.engines.base import ABORT
from millrace.infra.engines.upstream import NOT_WHOLE, UNTRAINABLE
from millrace.infra.gateway_processes import folder_of
from millrace.producers.capture.entry import Entry, StoredEntry
from millrace.producers.capture.log import CaptureLog
from millrace.producers.gateway.marks import marked_id
from millrace.producers.gateway.sessions import checkpoint
from millrace.producers.gateway.sessions.checkpoint import (
    CheckpointHead,
    ContentPlaces,
    EndedSession,
    SessionsCheckpoint,
)
from millrace.producers.gateway.sessions.ownership import Hints
from millrace.producers.gateway.sessions.reply_index import ChoiceExchange, ChoiceReply, ReplyIndex
from millrace.producers.gateway.sessions.responses import origin_of
from millrace.producers.gateway.sessions.session import GatewaySession, RewardKey, session_from_start
from millrace.producers.gateway.sessions.streaming_marks import StreamingMarks
from millrace.producers.gateway.spending import Spending
from millrace.schemas import codec
from millrace.schemas.errors import SchemaError
from millrace.schemas.ids import now_micros
from millrace.schemas.records import EpisodeStarted, Event, ModelCall, Reward, ToolCall
from millrace.schemas.requests import RequestStore, outline_request

logger = logging.getLogger(__name__)

_unreadable = telemetry.counter(
    "millrace.gateway.unreadable_sessions", "{session}", "episodes that a start could not rebuild from the capture log"
)

KEY_PREFIX = SESSION_KEY
ENDED_SESSIONS = 20_000
"""ended sessions that a late reward may still name"""


REPORT = "_report"
"""header of an event's entry: the source of the report that it came in, and its number there"""
ENDED_FIELDS = tuple(
    name for name in EndedSession.__struct_fields__ if name not in ("start", "rewards", "report_numbers", "is_newest")
)
"""what a session and its part of a checkpoint name alike"""
NAMED_S = 12 * 3600.0
NAMED_CALLS = 10_000
"""calls after which a name begins another episode"""


class CallInput(NamedTuple):
    """What a call was asked; `behind`: what stands before it that its request does not hold."""

    messages: list[Message]
    tools: Tools
    behind: str | None


class Sessions:
    """`folder`, that of the gateway's first process, keeps the secret of the session keys, unless one that several
    gateways share is given. After `named_s` a name that clients gave begins another episode, so that one in use all
    the time is learned from too. `index`: of this process among those of its gateway."""

    def __init__(
        self, folder: Path, policy: str, secret: str = "", *, named_s: float = NAMED_S, index: int = 0
    ) -> None:
        self.policy = policy
        self.index = index
        self.named_s = named_s
        self.live: dict[str, GatewaySession] = {}
        self.ended: OrderedDict[str, GatewaySession] = OrderedDict()
        self.count: Counter[str] = Counter()
        """live sessions by tenant"""
        self.unreadable: set[str] = set()
        """trajectories of the capture log that could not be rebuilt whole"""
        self._broken: set[str] = set()
        self._secret = secret.encode() or durable.once(folder / "secret", os.urandom(32))
        self.replies = ReplyIndex(folder_of(folder, index), named_s)
        self._aliases: dict[tuple[str, str, str], GatewaySession] = {}
        self._former: dict[tuple[str, str, str], GatewaySession] = {}
        """the newest ended session of each name"""
        self._attempts: dict[tuple[str, str], GatewaySession] = {}
        self._evicted: dict[str, list[tuple[int, int]]] = {}
        """places of the entries of sessions that are forgotten, whose responses may still be kept"""
        self._requests: dict[str, RequestStore] = {}
        """those of live sessions, while the log is read"""

    # ------------------------------------------------------------------ keys

    def key_of(self, session: GatewaySession) -> str:
        """The API key of one session."""
        return f"{KEY_PREFIX}{session.id}.{self._sign(session.id)}"

    def id_of(self, key: str) -> str | None:
        """The session id behind a key; None for any key that this gateway did not mint."""
        if not key.startswith(KEY_PREFIX):
            return None
        id, _, signature = key[len(KEY_PREFIX) :].partition(".")
        return id if hmac.compare_digest(signature.encode(), self._sign(id).encode()) else None

    def _sign(self, id: str) -> str:
        return hmac.new(self._secret, id.encode(), hashlib.sha256).hexdigest()[:32]

    # ------------------------------------------------------------------ life

    def get(self, id: str) -> GatewaySession | None:
        """A session, live or ended."""
        return self.live.get(id) or self.ended.get(id)

    def add(self, session: GatewaySession) -> None:
        """A session begins."""
        if session.id not in self.live:
            self.count[session.tenant] += 1
        self.live[session.id] = session
        if session.parent is None:
            self._attempts[(session.tenant, session.attempt)] = session
        if session.alias is not None:
            self._aliases[(session.tenant, session.subject, session.alias)] = session

    def retire(self, session: GatewaySession) -> None:
        """A session ended: keep what a late reward needs."""
        self.discard(session)
        session.shrink()
        self.ended[session.id] = session
        if session.alias is not None:
            name = (session.tenant, session.subject, session.alias)
            if (former := self._former.get(name)) is None or former.began <= session.began:
                self._former[name] = session
        while len(self.ended) > ENDED_SESSIONS:
            _, oldest = self.ended.popitem(last=False)
            self._evicted[oldest.id] = oldest.places
            name = (oldest.tenant, oldest.subject, oldest.alias or "")
            if self._former.get(name) is oldest:
                del self._former[name]

    def discard(self, session: GatewaySession) -> None:
        """Nothing continues this session any more, as if its call had never come."""
        if self.live.pop(session.id, None) is not None:
            self.count[session.tenant] -= 1
            if not self.count[session.tenant]:
                del self.count[session.tenant]
        self.replies.retire(session)
        name = (session.tenant, session.subject, session.alias or "")
        if session.alias is not None and self._aliases.get(name) is session:
            del self._aliases[name]
        if self._attempts.get((session.tenant, session.attempt)) is session:
            del self._attempts[(session.tenant, session.attempt)]

    def of_attempt(self, tenant: str, attempt: str) -> GatewaySession | None:
        """The live session of an attempt."""
        return self._attempts.get((tenant, attempt))

    def idle(self, timeout_s: float) -> list[GatewaySession]:
        """Live sessions that nothing happened in for so long."""
        return [session for session in self.live.values() if session.is_silent(timeout_s)]

    # ------------------------------------------------------------------ unsolicited calls

    def find_by_name(self, tenant: str, hints: Hints) -> GatewaySession | None:
        """The unsolicited session that a client gave a name of its own."""
        session = self._aliases.get((tenant, hints.subject, hints.name or ""))
        return None if session is not None and self._is_worn(session) else session

    def newest(self, tenant: str, hints: Hints) -> GatewaySession | None:
        """The newest unsolicited session of a name, live or ended, which a reward may name so."""
        name = (tenant, hints.subject, hints.name or "")
        return self._aliases.get(name) or self._former.get(name)

    def of_name(self, tenant: str, name: str) -> list[GatewaySession]:
        """The sessions that a tenant's clients gave this name, whoever their end users are, the newest last; of one end
        user the live one and the newest ended one."""
        items = (*self._former.items(), *self._aliases.items())
        sessions = {one.id: one for (owner, _, alias), one in items if (owner, alias) == (tenant, name)}
        return sorted(sessions.values(), key=lambda one: one.began)

    def _is_worn(self, session: GatewaySession) -> bool:
        """Whether a name that is in use all the time has used this episode up: silence will end it."""
        return session.turns >= NAMED_CALLS or now_micros() - session.began >= self.named_s * 1e6

    def make_session(
        self, tenant: str, hints: Hints, awaits: Sequence[str], reward_deadline_ms: int, policy: str | None = None
    ) -> GatewaySession:
        """A new episode that nobody asked for. Its group is its own root trajectory. `policy`: whose it is, unless it
        is the gateway's own."""
        id = marked_id(self.index)
        start: EpisodeStarted = {
            "task_id": id,
            "task": "",
            "ticket": None,
            "group_size": 1,
            "sample": 0,
            "min_version": 0,
            "deadline": None,
            "awaits": list(awaits),
            "reward_deadline_ms": reward_deadline_ms,
            "mode": "online",
            "versions": {
                "agent": "",
                "harness": "",
                "prompt": "",
                "tools": {},
                "guardrail": "",
                "retrieval": "",
                "memory": "",
            },
            "replay": None,
            "budget": {},
        }
        return GatewaySession(
            id,
            tenant,
            policy or self.policy,
            id,
            id,
            id,
            "train",
            start,
            alias=hints.name,
            subject=hints.subject,
            nameless=hints.name is None,
        )

    # ------------------------------------------------------------------ restart

    def rebuild(self, log: CaptureLog, spending: Spending | None = None, underway: StreamingMarks | None = None) -> int:
        """Take up where the log ends; returns the number of live sessions. Those that cannot be rebuilt are named and
        counted in `unreadable`; what the log holds of them stays as it is. `spending` learns what its calls cost,
        `underway` which replies are recorded."""
        spending = spending or Spending({})
        begin = 0
        state = checkpoint.read(log)
        if state is not None and state.head.limits == spending.windows:
            self._restore(state, log)
            spending.restore(state.head.spending)
            begin = state.head.end
        for one in log.read(begin):
            if underway is not None:
                underway.fold(one.entry.headers)
            self._refold_entry(one, spending)
        self.replies.settle()
        self._requests.clear()
        return len(self.live)

    def checkpoint(self, log: CaptureLog, spending: Spending, underway: StreamingMarks) -> Callable[[], None]:
        """Copy what a start needs to know of the log up to here; returns who writes it, in any thread. Raises
        OSError."""
        underway.compact()
        alias_sessions, attempt_sessions = set(self._aliases.values()), set(self._attempts.values())
        responding = self.replies.stored.sessions
        for former in self.ended.values():
            if former.places and former.id not in responding:
                former.places = []
        self._evicted = {id: places for id, places in self._evicted.items() if id in responding}
        ended_places = {id: session.places for id in responding if (session := self.ended.get(id)) is not None}
        content = [
            ContentPlaces(one.id, [*one.places], True, one in alias_sessions, one in attempt_sessions)
            for one in self.live.values()
            if one.places
        ]
        content += [
            ContentPlaces(id, [*places], False, False, False) for id, places in (self._evicted | ended_places).items()
        ]
        newest = {session.id for session in self._former.values()}
        ended_sessions = list(self.ended.values())
        head = CheckpointHead(
            checkpoint.FORMAT,
            log.source,
            log.end,
            spending.windows,
            spending.standing(),
            sorted(self.unreadable),
            sorted(self._broken),
            self.replies.stored.doubtful,
        )
        lists = [
            iter(content),
            (_ended_session(one, is_newest=one.id in newest) for one in ended_sessions),
            iter(self.replies.givers.copy()),
            iter(self.replies.owners.copy()),
        ]
        return partial(checkpoint.write, log.folder, head, lists)

    def _restore(self, state: SessionsCheckpoint, log: CaptureLog) -> None:
        """Take up the state of a checkpoint, before the entries behind it are folded."""
        content = {one.id: one for one in state.content}
        # Folding their entries finds out anew which of these cannot be rebuilt, at the same entry as before.
        self.unreadable = set(state.head.unreadable) - content.keys()
        self._broken = set(state.head.broken_chains) - content.keys()
        self.replies.stored.restore(state.head.doubtful)
        self._evicted = {one.id: one.places for one in state.content if not one.is_live}
        for ended_session in state.ended_sessions:
            session = self.ended[ended_session.id] = _session_of(ended_session)
            session.places = self._evicted.pop(session.id, [])
            if ended_session.is_newest:
                self._former[session.tenant, session.subject, session.alias or ""] = session
        no_spending, over = Spending({}), {**self.ended}
        for entry in log.at(place for one in state.content for place in one.places):
            if content[entry.entry.headers.get("trajectory", "")].is_live:
                self._refold_entry(entry, no_spending)
            else:
                self._keep_again(entry.entry, over)
        self._aliases = {n: session for n, session in self._aliases.items() if content[session.id].has_alias}
        self._attempts = {n: session for n, session in self._attempts.items() if content[session.id].has_attempt}
        self.unreadable |= set(state.head.unreadable)
        self._broken |= set(state.head.broken_chains)
        self.replies.givers.restore(state.replies)
        self.replies.owners.restore(state.spent_replies)

    def _keep_again(self, entry: Entry, over: dict[str, GatewaySession]) -> None:
        """Keep the response of an entry of a session that has ended: the checkpoint says all else of it. `over`: such
        sessions by their ids; those that are forgotten but for their responses begin anew."""
        trajectory, kind = entry.headers["trajectory"], entry.headers.get("kind")
        if kind == "episode_ended":  # as in a fold, nothing that stands behind it is a call of the session
            self._requests.pop(trajectory, None)
            over.pop(trajectory, None)
        if kind != ("model_call" if trajectory in over else "episode_started"):
            return
        try:
            event = codec.decode_as("Event", entry.value)
            body = codec.decode_body(event["kind"], event["body"])
            if kind == "episode_started":
                over[trajectory] = session_from_start(event, cast(EpisodeStarted, body), entry.headers)
            else:
                session, call = over[trajectory], cast(ModelCall, body)
                reply, _ = self._reply_of(call, entry.headers, self._request_of(session, event, call))
                self.replies.store(session, reply, event["capture_time"])
        except Exception as error:
            self._name(trajectory, error)

    def _refold_entry(self, stored_entry: StoredEntry, spending: Spending) -> None:
        """Fold one event. A session whose calls cannot be folded begins a new lineage with its next call; one whose
        chain cannot be followed is dropped. All others are served, whatever an older release or a broken disk left."""
        entry = stored_entry.entry
        trajectory = entry.headers.get("trajectory", "")
        try:
            event = codec.decode_as("Event", entry.value)
        except SchemaError as error:
            self._name(trajectory, error)
            self._broken.add(trajectory)
            if (session := self.get(trajectory)) is not None:
                self._evicted[trajectory] = session.places
                self.ended.pop(trajectory, None)
                self.discard(session)
            return
        spending.fold(entry.headers, event["capture_time"])
        if trajectory in self._broken:
            return
        try:
            self._refold(event, entry.headers)
        except Exception as error:
            self._name(trajectory, error)
            session = self.live.get(trajectory)
            if session is not None:
                session.forget()
        if (session := self.get(trajectory)) is not None:
            session.places.append((stored_entry.seq, stored_entry.offset))

    def _name(self, trajectory: str, error: Exception) -> None:
        if trajectory not in self.unreadable:
            logger.error("trajectory %s cannot be rebuilt: %s: %s", trajectory, type(error).__name__, error)
            _unreadable.add(1)
            self.unreadable.add(trajectory)

    def _refold(self, event: Event, headers: Mapping[str, str]) -> None:
        session = self.get(event["trajectory"])
        if session is not None:
            session.follow(event["kind"], event["step"], event["hash"])
            if session.has_ended and session.id in self.live:
                self.retire(session)
                self._requests.pop(session.id, None)
        if session is not None and REPORT in headers:
            source, _, seq = headers[REPORT].rpartition(" ")
            session.report_numbers[source] = int(seq) + 1
        kind, body = event["kind"], codec.decode_body(event["kind"], event["body"])
        if kind == "episode_started":
            session = session_from_start(event, cast(EpisodeStarted, body), headers)
            self.add(session)
            session.follow(kind, event["step"], event["hash"])
        if session is None:
            return  # its start lies in files that are gone, or was never written: nothing can be added to it
        if kind == "model_call" and not session.has_ended:
            self._recall(session, event, cast(ModelCall, body), headers)
        elif kind == "tool_call" and (asked_id := cast(ToolCall, body)["asked_id"]) is not None:
            session.asks.joined_before(asked_id)
        elif kind == "reward":
            reward = cast(Reward, body)
            session.rewards.add(RewardKey(reward["source"], reward["reward_id"]))

    def _request_of(self, session: GatewaySession, event: Event, call: ModelCall) -> bytes:
        request = self._requests.setdefault(session.id, RequestStore()).add(event["id"], call)
        if request is None:
            raise ValueError(f"its request goes on from {call['request_base']}, which the log does not hold")
        return request

    def _reply_of(self, call: ModelCall, headers: Mapping[str, str], request: bytes) -> tuple[ChoiceReply, CallInput]:
        """What a call said, but for the digest with it, and what it was asked."""
        reading = read(request, call["response"])
        is_ours, is_whole = call["untrainable_reason"] != UNTRAINABLE, call["opened"] != NOT_WHOLE
        origin = LOCAL_ORIGIN if is_ours else origin_of(headers, is_whole=is_whole)
        if origin is not None and call["finish_reason"] == ABORT:
            origin = origin._replace(whole=False)
        is_stored = origin is not None and (origin.away or origin.whole)
        return ChoiceReply(
            call["response_id"],
            call["choice"],
            reading.replies[call["choice"]],
            b"",
            call["response"],
            call["finish_reason"],
            reading.stored if is_stored else None,
            origin or LOCAL_ORIGIN,
            has_our_ids=is_ours,
        ), CallInput(reading.messages, reading.tools, None if is_whole else reading.behind)

    def _recall(self, session: GatewaySession, event: Event, call: ModelCall, headers: Mapping[str, str]) -> None:
        request = self._request_of(session, event, call)
        reply, asked = self._reply_of(call, headers, request)
        digests = match_keys.chain(*asked)
        reply = reply._replace(digest=match_keys.extend(digests[-1], reply.message))
        self.replies.note_echo(session, reply)
        outline, at = outline_request(request), event["capture_time"]
        exchange = ChoiceExchange(
            event["policy"], asked.messages, outline, call["supersedes"], reply, event["event_time"], at
        )
        self.replies.learn(session, exchange, event["id"])
        hash = match_keys.request_hash(request)
        if not reply.has_our_ids:  # it has no tokens that another call could go on from
            session.lineages.turns = max(session.turns, call["turn"] + 1)
            if ORIGIN in headers:
                session.lineages.note_answer(hash, reply.id, call["turn"])
        elif session.id not in self.unreadable:
            lineages = session.lineages_of(event["policy"])
            lineages.apply(call, asked.messages, digests, hash, reply.message, template_options(request))


def _ended_session(session: GatewaySession, *, is_newest: bool) -> EndedSession:
    """What a checkpoint holds of it. A thread may ask while the event loop adds a reward."""
    fields = {name: getattr(session, name) for name in ENDED_FIELDS}
    return EndedSession(
        **fields,
        start=cast(dict[str, Any], session.start),
        rewards=[(*key,) for key in [*session.rewards]],
        report_numbers={**session.report_numbers},
        is_newest=is_newest,
    )


def _session_of(ended_session: EndedSession) -> GatewaySession:
    fields = {name: getattr(ended_session, name) for name in ENDED_FIELDS}
    session = GatewaySession(
        **fields,
        start=cast(EpisodeStarted, ended_session.start),
        has_ended=True,
        report_numbers=ended_session.report_numbers,
    )
    session.rewards = {RewardKey(*key) for key in ended_session.rewards}
    return session
