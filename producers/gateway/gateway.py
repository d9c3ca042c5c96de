"""The gateway's work, free of HTTP: whose call it is, sampling it, recording it, and the life of sessions.

Invariants: everything about a reply is in the capture log before its last byte leaves (`chat` returns after it,
`stream` yields its last chunks after it); a reply that breaks off is recorded as aborted with the tokens that came; a
call that failed before its first token leaves no trace in its session; ending a session first ends its calls."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from infra import telemetry
from infra.errors import ConfigError, EngineError, EngineRejected
from producers.engines.base import Chunk
from producers.gateway import keys
from producers.gateway.call import Call
from producers.gateway.errors import ApiError, of_engine
from producers.gateway.fleet import Fleet
from producers.gateway.lineage import ABORT
from producers.gateway.options import Options
from producers.gateway.recorder import Recorder
from producers.gateway.rendering.base import Renderer, RenderError
from producers.gateway.session import Session, to_reply
from producers.gateway.sessions import Sessions
from producers.gateway.stream import chunks_of, first_chunk, last_chunks
from producers.gateway.wire import parse_chat, to_messages, to_sampling
from schemas.ids import new_id

logger = logging.getLogger(__name__)

_calls = telemetry.counter("millrace.gateway.calls", "{call}", "chat calls served, by finish reason")
_tokens = telemetry.counter("millrace.gateway.tokens", "{token}", "tokens sampled")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: a tenant, the session whose own key was used, if any, and whether it may take grants."""

    tenant: str
    session: Session | None
    granted: bool = False


class Gateway:
    """The parts, made elsewhere: see `producers.gateway.serve`. Without a renderer it only keeps sessions, and
    `producers.gateway.passthrough` answers the calls."""

    def __init__(
        self, options: Options, sessions: Sessions, recorder: Recorder, fleet: Fleet, renderer: Renderer | None
    ) -> None:
        self.options = options
        # By digest, so that how long a look-up takes tells nothing about a key.
        self._tenants = {_digest(key): tenant for key, tenant in options.keys.items()}
        self.sessions = sessions
        self.recorder = recorder
        self.fleet = fleet
        self.renderer = renderer

    # ------------------------------------------------------------------ who

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """The caller behind a request's headers. Raises ApiError 401."""
        given = headers.get("authorization", "").removeprefix("Bearer ").strip() or headers.get("x-api-key", "")
        id = self.sessions.id_of(given)
        if id is not None:
            session = self.sessions.get(id)
            if session is None:
                raise ApiError(401, "This session key has expired: start a new session", code="session_expired")
            return Caller(session.tenant, session)
        if not self._tenants:
            return Caller(self.options.tenant, None, granted=True)
        digest = _digest(given)
        tenant = self._tenants.get(digest)
        if tenant is None:
            raise ApiError(
                401, "Incorrect API key provided: use a session's own key or a configured one", code="invalid_api_key"
            )
        return Caller(tenant, None, granted=digest == _digest(self.options.rollout_key))

    def session_of(self, caller: Caller, headers: Mapping[str, str], messages: Any, digests: list[bytes]) -> Session:
        """The session of a call; an unsolicited one, not begun yet, where it belongs to none."""
        session = caller.session
        named = headers.get("x-millrace-session") or headers.get("x-session-id")
        if session is None and named:
            session = self.sessions.live.get(named) or self.sessions.named(caller.tenant, named)
            if session is not None and session.tenant != caller.tenant:
                raise ApiError(403, "This session belongs to another tenant", code="wrong_tenant")
        if session is None and not named:
            session = self.sessions.continued(caller.tenant, messages, digests)
        if session is None:
            session = self.sessions.unsolicited(
                caller.tenant, named, self.options.awaits, self.options.reward_deadline_ms
            )
        if session.ended:
            raise _ended(session)
        session.touch()
        return session

    # ------------------------------------------------------------------ calls

    async def prepare(self, headers: Mapping[str, str], body: bytes) -> Call:
        """Everything of a call before its first token. Raises ApiError."""
        if self.renderer is None:
            raise ConfigError("this gateway has no model to render for: set [gateway] engine_url, or upstream_url")
        caller = self.identify(headers)
        request = parse_chat(body)
        messages = to_messages(request)
        digests = keys.chain(messages, request.offered)
        session = self.session_of(caller, headers, messages, digests)
        response_id = f"chatcmpl-{new_id()}"
        hash = keys.request_hash(body)
        try:
            plan = session.lineages.plan(messages, digests, hash, request.offered, self.renderer, response_id)
        except RenderError as error:
            raise ApiError(400, str(error), param="messages", code="unsupported_messages") from error
        try:
            sampling = to_sampling(request, session.defaults, self.options.max_model_len - len(plan.prompt))
            if session.step == 0:
                self.begin(session)
            minimum = session.start["min_version"]
            target = await self.fleet.route(session.granted, minimum, session.engine, self.options.patience_s)
        except (ApiError, EngineError, asyncio.CancelledError) as error:
            session.lineages.withdraw(plan)
            if isinstance(error, EngineRejected):
                raise of_engine(error) from error
            if isinstance(error, EngineError):
                raise _unserved(error) from error
            raise
        if session.ended:
            raise _ended(session)
        session.engine = target.url
        return Call(session, request, body, plan, sampling, self.renderer, target, response_id)

    async def chat(self, call: Call) -> bytes:
        """The whole response of a call, recorded. Raises ApiError."""
        try:
            async with aclosing(self._sampled(call, stream=False)) as chunks:
                async for chunk in chunks:
                    call.take(chunk)
        finally:
            response = call.response()
            if call.first is not None:
                self._record(call, response)
        await self.recorder.log.durable()
        if any(choice.reason == ABORT for choice in call.choices):
            raise ApiError(503, "The engine aborted this reply: try again", type="server_error", code="engine_aborted")
        return response

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """The response of a call as server-sent events, those that are ready at once together. Raises ApiError before
        the first of them only.

        Await the first events before the response's status is sent."""
        recorded = False
        events: list[bytes] = []
        try:
            async with aclosing(self._sampled(call, stream=True)) as chunks:
                async for chunk in chunks:
                    choice, deltas = call.take(chunk)
                    if not choice.begun:
                        choice.begun = True
                        events.append(first_chunk(call, choice))
                    events += chunks_of(call, choice, deltas, len(chunk.token_ids))
                    if events and not call.finished:  # the last tokens leave with the end of the response
                        yield b"".join(events)
                        events.clear()
            self._record(call, call.response())
            recorded = True
            await self.recorder.log.durable()
            yield b"".join([*events, *last_chunks(call)])
        except ApiError as error:
            if call.first is None:
                raise
            self._record(call, call.response())
            recorded = True
            # Cutting the stream would look like its end to OpenAI's client; an error event does not.
            yield b"".join([*events, b"data: " + error.body() + b"\n\n"])
        finally:
            if call.first is not None and not recorded:
                self._record(call, call.response())

    @contextmanager
    def calling(self, session: Session, name: str) -> Iterator[None]:
        """The current task is a call of the session: it keeps the session from being idle, and ends with it."""
        task = asyncio.current_task()
        assert task is not None
        session.calls[name] = task
        try:
            yield
        finally:
            session.calls.pop(name, None)
            session.touch()

    async def _sampled(self, call: Call, *, stream: bool) -> AsyncGenerator[Chunk, None]:
        """The engine's chunks. A failure before the first leaves no trace. Raises ApiError."""
        with self.calling(call.session, call.response_id):
            async with aclosing(self._chunks(call, stream=stream)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _chunks(self, call: Call, *, stream: bool) -> AsyncGenerator[Chunk, None]:
        target = call.target
        target.running += 1
        try:
            async with aclosing(
                target.engine.generate(call.plan.prompt, call.sampling, request_id=call.call_id, stream=stream)
            ) as chunks:
                async for chunk in chunks:
                    yield chunk
        except EngineError as error:
            answer = of_engine(error)
            if answer.status >= 500:
                self.fleet.doubt(target)
            raise answer from error
        finally:
            target.running -= 1
            if call.first is None:
                call.session.lineages.withdraw(call.plan)

    def _record(self, call: Call, response: bytes) -> None:
        session, plan = call.session, call.plan
        for choice in call.choices:
            body, breach = call.record(choice, response, call.target.url)
            if breach is not None:
                logger.warning("%s of %s: %s from %s", call.response_id, session.id, breach, call.target.url)
                self.fleet.doubt(call.target)
            self.recorder.record(session, "model_call", body, actor="policy", event_time=call.when)
            reply = to_reply(choice.message())
            digest = session.lineages.apply(body, plan.messages, plan.digests, plan.hash, reply)
            self.sessions.replied(session, digest)
            session.said = reply["content"] or session.said
            _calls.add(1, finish=choice.reason)
            _tokens.add(len(choice.ids))

    # ------------------------------------------------------------------ sessions

    def begin(self, session: Session) -> None:
        """A session starts: its first event, and its place among the live ones."""
        self.recorder.record(session, "episode_started", session.start, actor="agent")
        self.sessions.add(session)

    async def end(
        self,
        session: Session,
        *,
        status: str,
        stop_condition: str,
        output: str | None = None,
        reason: str | None = None,
    ) -> None:
        """A session ends, its calls first. Idempotent."""
        while session.busy and not session.ended:
            running = list(session.calls.values())
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=5.0)
        if session.ended:
            return
        start = session.start
        body = {
            "status": status,
            "stop_condition": stop_condition,
            "steps": session.step,
            "output": output if output is not None else session.said,
            "reason": reason,
            "whole": session.whole,
            "task_id": start["task_id"],
            "task": start["task"],
            "awaits": start["awaits"],
        }
        self.recorder.record(session, "episode_ended", body, actor="agent")
        session.ended = True
        self.sessions.retire(session)
        await self.recorder.log.durable()

    async def drain(self, timeout_s: float) -> None:
        """Wait for the calls in flight, then cut them off: each is recorded as far as it came."""
        for patience in (timeout_s, 5.0):
            running = [task for session in self.sessions.live.values() for task in session.calls.values()]
            if not running:
                return
            _, late = await asyncio.wait(running, timeout=patience)
            for task in late:
                task.cancel()

    async def reap(self) -> None:
        """End what has been silent for too long. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self.options.idle_timeout_s / 4))
            for session in self.sessions.idle(self.options.idle_timeout_s):
                status = "abandoned" if session.granted else "completed"
                await self.end(session, status=status, stop_condition="idle")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _ended(session: Session) -> ApiError:
    return ApiError(403, f"Session {session.id} has ended: start a new one", code="session_ended")


def _unserved(error: EngineError) -> ApiError:
    """No engine could be given the call: the client may try again."""
    return ApiError(503, str(error), type="server_error", code="no_engine", retry_after_s=1)
