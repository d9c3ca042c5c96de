"""The gateway's work, free of HTTP: its parts, what is refused before a call, and the life of sessions.

Invariants: an episode that nobody asked for begins with the first record of a call, and is gone where there is none;
ending a session first ends its calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from millrace.dialects.errors import ApiError
from millrace.dialects.rendering.base import Message, Renderer
from millrace.infra.principals.watch import PrincipalWatch
from millrace.producers.gateway.calls.fleet import Fleet
from millrace.producers.gateway.calls.policies import Policies
from millrace.producers.gateway.calls.served_policy import AwaitedPolicy, ServedPolicy
from millrace.producers.gateway.calls.session_matching import SessionMatching, ended_refusal
from millrace.producers.gateway.http.callers import Caller, Callers
from millrace.producers.gateway.options import GatewayOptions
from millrace.producers.gateway.sessions.followups import followup
from millrace.producers.gateway.sessions.recorder import Recorder, log_full
from millrace.producers.gateway.sessions.session import GatewaySession, RewardKey
from millrace.producers.gateway.sessions.sessions import Sessions
from millrace.schemas.ids import now_micros
from millrace.schemas.records import EpisodeEnded, EpisodeStatus

logger = logging.getLogger(__name__)

ENDING_S = 5.0
"""how long an end waits for a call that was cut off, before it cuts it off again"""


class CallInSession:
    """While it is entered, the current task is a call of the session: it keeps the session from being idle, and ends
    with it."""

    __slots__ = ("_name", "_session")

    def __init__(self, session: GatewaySession, name: str) -> None:
        self._session = session
        self._name = name

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._session.calls[self._name] = task

    def __exit__(self, *_: object) -> None:
        self._session.calls.pop(self._name, None)
        self._session.touch()


class Gateway:
    """The parts, made elsewhere: see `millrace.producers.gateway.serve`. `fleet` and `renderer` are those of its own
    policy, beside which it serves `others`; those of `awaited` are served once they `join`. `principals` tells whose
    the keys of the log are. Without a renderer and without these it only keeps sessions, and
    `millrace.producers.gateway.upstreams` answers the calls."""

    def __init__(
        self,
        options: GatewayOptions,
        sessions: Sessions,
        recorder: Recorder,
        fleet: Fleet,
        renderer: Renderer | None,
        other_policies: Sequence[ServedPolicy] = (),
        awaited_policies: Sequence[AwaitedPolicy] = (),
        principals: PrincipalWatch | None = None,
    ) -> None:
        self.options = options
        self.callers = Callers(options, sessions, principals)
        self.sessions = sessions
        self.matching = SessionMatching(options, sessions)
        self.recorder = recorder
        self.stopping = False
        """no new call is taken any more"""
        served_policies: tuple[ServedPolicy, ...] = ()
        if renderer is not None:
            served_policies = (
                ServedPolicy(options.policy, renderer, fleet, options.max_model_len, options.prices),
                *other_policies,
            )
        self.engines = Policies(options.policy, served_policies, awaited_policies)
        """the policies that engines answer; none where upstreams answer everything"""

    @property
    def policies(self) -> tuple[str, ...]:
        """Whose episodes are kept here, the gateway's own first: also where upstreams answer their calls."""
        return self.engines.names or (self.options.policy,)

    async def delete(self, response: str) -> None:
        """Nobody may name a response any more, also after a restart. Raises ApiError 503 where the disk does not take
        that: then it stays."""
        try:
            await asyncio.to_thread(self.sessions.replies.delete, response)
        except OSError as error:
            logger.error("response %s is not deleted: %s", response, error)
            raise log_full() from error

    def check_open(self) -> None:
        """Raises ApiError 503 once the gateway is about to stop."""
        if self.stopping:
            raise ApiError(503, "The gateway stops: try again", type="server_error", code="stopping", retry_after_s=1)

    def check_spends(self, caller: Caller) -> None:
        """What costs, and is not captured, is about to be asked for. Raises ApiError 403 for the key of a session that
        has ended, and 429 for a key that has spent what it may."""
        if caller.session is not None and caller.session.has_ended:
            raise ended_refusal(caller.session)
        self.recorder.spending.check(caller.key, now_micros())

    async def check_serves(self, caller: Caller) -> None:
        """A call is about to begin. Raises ApiError 429 for a key that has spent what it may, and 503 where capture is
        required and nothing could be captured."""
        self.recorder.spending.check(caller.key, now_micros())
        await self.recorder.check()

    def followed_up(self, session: GatewaySession, messages: Sequence[Message], digests: Sequence[bytes]) -> None:
        """Record what a call's messages say of the session's newest reply, before the call's own is the newest."""
        if self.options.followups:
            reward = followup(session, messages, digests)
            if reward is not None and self.recorder.record(session, "reward", reward, actor="evaluator") is not None:
                session.rewards.add(RewardKey(reward["source"], reward["reward_id"]))

    # ------------------------------------------------------------------ sessions

    def begin(self, session: GatewaySession) -> bool:
        """A session starts: its first event, and its place among the live ones. False: the event is lost."""
        id = self.recorder.record(session, "episode_started", session.start, actor="agent")
        self.sessions.add(session)
        return id is not None

    def ensure_start(self, session: GatewaySession) -> bool:
        """An episode that nobody asked for begins with the first record of a call. False: its start is lost."""
        return session.step > 0 or self.begin(session)

    def discard_if_empty(self, session: GatewaySession) -> None:
        """A call failed: an episode that has nothing else is gone."""
        if session.step == 0 and not session.busy and not session.gap_open:
            self.sessions.discard(session)

    async def end(
        self,
        session: GatewaySession,
        *,
        status: EpisodeStatus,
        stop_condition: str,
        output: str | None = None,
        reason: str | None = None,
    ) -> None:
        """A session ends, its calls first. Idempotent. Raises ApiError 503 where not even the log's reserve takes its
        end: then it has not ended."""
        while session.busy and not session.has_ended:
            running = list(session.calls.values())
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=ENDING_S)
        if session.has_ended:
            await self.recorder.durable(session)
            return
        start = session.start
        body: EpisodeEnded = {
            "status": status,
            "stop_condition": stop_condition,
            "steps": session.step,
            "output": output if output is not None else session.newest_text,
            "reason": reason,
            "whole": session.is_whole,
            "task_id": start["task_id"],
            "task": start["task"],
            "awaits": start["awaits"],
        }
        self.recorder.accept(session, "episode_ended", body, actor="agent")
        session.has_ended = True
        self.sessions.retire(session)
        await self.recorder.durable(session)

    async def drain(self, timeout_s: float) -> None:
        """Wait for the calls in flight, then cut them off: each is recorded as far as it came."""
        for patience in (timeout_s, ENDING_S):
            running = [task for session in self.sessions.live.values() for task in session.calls.values()]
            if not running:
                return
            _, late_tasks = await asyncio.wait(running, timeout=patience)
            for task in late_tasks:
                task.cancel()
