"""The gateway's work, free of HTTP: the session of a call, sampling it, recording it, and the life of sessions.

Invariants: everything about a reply is in the capture log before its last byte leaves (`chat` returns after it,
`stream` yields its last chunks after it, and its first ones after a mark, by which the next process labels what a
killed one left), and what cannot be captured leaves a gap there and never costs the reply; a reply that breaks off, or
whose client left, is recorded as aborted with the tokens that came; a call that failed before its first token leaves
no trace in its session, and begins no episode; ending a session first ends its calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import Any

from millrace.dialects import match_keys
from millrace.dialects.all import CHAT
from millrace.dialects.base import Dialect
from millrace.dialects.conversation import Ask, Part, messages_of
from millrace.dialects.errors import ApiError, not_held, of_engine
from millrace.dialects.recall import Recall, StoredResponse
from millrace.dialects.rendering.base import Message, PromptTooLong, Renderer, RenderError
from millrace.dialects.template_options import template_options
from millrace.infra import telemetry
from millrace.infra.engines.base import ABORT, Chunk
from millrace.infra.errors import ConfigError, EngineError, EngineRejected
from millrace.infra.process.offload import HEAVY, SLICE, Step, aside, by_turns
from millrace.producers.gateway.calls.call import Call, Choice, slices
from millrace.producers.gateway.calls.constraint import grammar_of
from millrace.producers.gateway.calls.fleet import Fleet
from millrace.producers.gateway.calls.models import wanted
from millrace.producers.gateway.calls.policies import Policies
from millrace.producers.gateway.calls.sampling import to_sampling, too_long
from millrace.producers.gateway.calls.served_policy import Awaited, Served
from millrace.producers.gateway.calls.understanding import understand
from millrace.producers.gateway.http.callers import Caller, Callers
from millrace.producers.gateway.marks import marked_id
from millrace.producers.gateway.options import GatewayOptions
from millrace.producers.gateway.sessions.followups import followup
from millrace.producers.gateway.sessions.ownership import Found, Hints, hints
from millrace.producers.gateway.sessions.recorder import LARGE, Recorder, log_full
from millrace.producers.gateway.sessions.responses import ResponseRecall, named, nameless, owner_of
from millrace.producers.gateway.sessions.session import GatewaySession, RewardKey, to_reply
from millrace.producers.gateway.sessions.sessions import Sessions
from millrace.schemas.ids import now_micros
from millrace.schemas.records import EpisodeEnded, EpisodeStatus

logger = logging.getLogger(__name__)

ENDING_S = 5.0
"""how long an end waits for a call that was cut off, before it cuts it off again"""
WHOLE = 2**17
"""numbers beyond which even a plain reply comes from the engine piece by piece"""

_calls = telemetry.counter("millrace.gateway.calls", "{call}", "calls served, by finish reason")
_tokens = telemetry.counter("millrace.gateway.tokens", "{token}", "tokens sampled")


class Gateway:
    """The parts, made elsewhere: see `millrace.producers.gateway.serve`. `fleet` and `renderer` are those of its own
    policy, beside which it serves `others`; those of `awaited` are served once they `join`. Without a renderer and
    without these it only keeps sessions, and `millrace.producers.gateway.upstreams` answers the calls."""

    def __init__(
        self,
        options: GatewayOptions,
        sessions: Sessions,
        recorder: Recorder,
        fleet: Fleet,
        renderer: Renderer | None,
        others: Sequence[Served] = (),
        awaited: Sequence[Awaited] = (),
    ) -> None:
        self.options = options
        self.callers = Callers(options, sessions)
        self.sessions = sessions
        self.recorder = recorder
        self.stopping = False
        """no new call is taken any more"""
        served: tuple[Served, ...] = ()
        if renderer is not None:
            served = (Served(options.policy, renderer, fleet, options.max_model_len, options.prices), *others)
        self.engines = Policies(options.policy, served, awaited)
        """the policies that engines answer; none where upstreams answer everything"""

    @property
    def policies(self) -> tuple[str, ...]:
        """Whose episodes are kept here, the gateway's own first: also where upstreams answer their calls."""
        return self.engines.names or (self.options.policy,)

    # ------------------------------------------------------------------ whose

    def session_of(
        self,
        caller: Caller,
        hints: Hints,
        messages: Sequence[Message],
        digests: Sequence[bytes],
        used: Sequence[StoredResponse] = (),
        policy: str | None = None,
    ) -> Found:
        """The session of a call, an unsolicited one of this policy, not begun yet, where it belongs to none. `used`:
        the responses that it named. Raises ApiError 403."""
        session, proven, by = caller.session, True, "key"
        if session is None and hints.name:
            session, by = self._named(caller, hints), hints.named_by
        elif session is None and len(told := {kept.session for kept in used}) == 1 and told & self.sessions.live.keys():
            session, by = self.sessions.live[told.pop()], "response_id"
        elif session is None and (
            found := self.sessions.conversations.find(caller.tenant, hints.subject, messages, digests)
        ):
            session, proven, by = found
        if session is None:
            by = hints.named_by if hints.name else "first"
            terms = self.options.terms(policy)
            session = self.sessions.unsolicited(caller.tenant, hints, terms.awaits, terms.reward_deadline_ms, policy)
        if session.ended:
            raise _ended(session)
        session.touch()
        return Found(session, proven, by)

    def _named(self, caller: Caller, hints: Hints) -> GatewaySession | None:
        """The caller's live session that goes by the id or the name that a call gives. The id of another tenant's is a
        name like any other: nobody learns from it whether there is such a session."""
        session = self.sessions.live.get(hints.name or "")
        if session is None or session.tenant != caller.tenant:
            session = self.sessions.named(caller.tenant, hints)
        if session is not None:
            caller.check_speaks_in(session)
        return session

    def recall(self, caller: Caller, headers: Mapping[str, str], users: Sequence[Any] = ()) -> Recall:
        """The stored responses that a call may name, which says this of its end user. Raises ApiError 403."""
        said, session = hints(headers, *users), caller.session
        if session is None and said.name:
            session = self._named(caller, said)
        if session is not None:
            owner = owner_of(session)
        elif said.name:
            owner = named(caller.tenant, said.subject, said.name)
        else:
            owner = nameless(caller.tenant, said.subject)
        return ResponseRecall(self.sessions.stored, owner, self.options.max_body_bytes)

    async def delete(self, response: str) -> None:
        """Nobody may name a response any more, also after a restart. Raises ApiError 503 where the disk does not take
        that: then it stays."""
        try:
            await asyncio.to_thread(self.sessions.delete, response)
        except OSError as error:
            logger.error("response %s is not deleted: %s", response, error)
            raise log_full() from error

    def called(
        self,
        caller: Caller,
        hints: Hints,
        messages: Sequence[Message],
        digests: Sequence[bytes],
        used: Sequence[StoredResponse] = (),
        policy: str | None = None,
    ) -> Found:
        """`session_of`, where calls that come meanwhile find it too. It begins with its first record."""
        found = self.session_of(caller, hints, messages, digests, used, policy)
        if found.session.id not in self.sessions.live:
            if hints.held:
                raise not_held()
            self.admit(caller.tenant)
            self.sessions.add(found.session)
        return found

    def check_open(self) -> None:
        """Raises ApiError 503 once the gateway is about to stop."""
        if self.stopping:
            raise ApiError(503, "The gateway stops: try again", type="server_error", code="stopping", retry_after_s=1)

    def admit(self, tenant: str) -> None:
        """Raises ApiError 429 for a tenant that has as many live episodes as it may."""
        if self.sessions.count[tenant] >= self.options.max_sessions:
            raise ApiError(
                429,
                f"This tenant has {self.options.max_sessions} live episodes: end some, or try again later",
                type="rate_limit_error",
                code="too_many_sessions",
                retry_after_s=1,
            )

    def check_spends(self, caller: Caller) -> None:
        """What costs, and is not captured, is about to be asked for. Raises ApiError 403 for the key of a session that
        has ended, and 429 for a key that has spent what it may."""
        if caller.session is not None and caller.session.ended:
            raise _ended(caller.session)
        self.recorder.spending.check(caller.key, now_micros())

    async def check_serves(self, caller: Caller) -> None:
        """A call is about to begin. Raises ApiError 429 for a key that has spent what it may, and 503 where capture is
        required and nothing could be captured."""
        self.recorder.spending.check(caller.key, now_micros())
        await self.recorder.check()

    # ------------------------------------------------------------------ calls

    async def prepare(self, caller: Caller, headers: Mapping[str, str], body: bytes, dialect: Dialect = CHAT) -> Call:
        """Everything of a call before its first token. Raises ApiError."""
        if not self.engines.names:
            raise ConfigError("this gateway has no model to render for: set [gateway] engine_url, or upstream_url")
        size = HEAVY if dialect.refers(body) else len(body)
        asked = await aside(size, understand, dialect, body, partial(self.recall, caller, headers), self.options)
        request, messages, body = asked.request, asked.messages, asked.body
        policy, version = wanted(self.engines.names, request.model)
        if policy is not None:
            self.engines.of(policy)
        await self.check_serves(caller)
        said = hints(headers, *request.users, name=request.name, field=dialect.names_in)
        session, proven, by = self.called(caller, said, messages, asked.digests, asked.used, policy)
        try:
            served = self.engines.of(policy or session.policy)
        except ApiError:
            self.unbegun(session)
            raise
        own = served.policy == session.policy
        lineages, affinity = session.lineages_of(served.policy), session.engines.get(served.policy)
        self.sessions.stored.touch(asked.used)
        response_id = f"{dialect.prefix}{marked_id(self.sessions.index)}"
        plan = lineages.open(messages, asked.digests, asked.hash, response_id, proven=proven, options=asked.options)
        try:
            # A call from here on: neither silence nor another call's failure ends its session meanwhile.
            with self.calling(session, response_id):
                size = len(body) + plan.weight
                await aside(size, lineages.write, plan, request.tools, served.renderer, request.prompt)
                grammar = None
                if request.held:
                    grammar = await aside(len(body), grammar_of, request, served.renderer.marks(plan.prompt))
                room = served.max_model_len - len(plan.prompt)
                sampling = to_sampling(request, session.defaults, room, grammar)
                # A grant speaks of the versions of its own policy.
                granted, minimum = session.granted and own, session.start["min_version"] if own else 0
                patience_s = self.options.patience_s
                target = await served.fleet.route(granted, minimum, affinity, patience_s, version)
        except BaseException as error:
            session.lineages_of(served.policy).withdraw(plan)
            self.unbegun(session)
            if isinstance(error, RenderError):
                raise _unwritten(error, request.asked_in) from error
            if isinstance(error, EngineRejected):
                raise of_engine(error) from error
            if isinstance(error, EngineError):
                raise _unserved(error) from error
            raise
        if session.ended:
            raise _ended(session)
        session.engines[served.policy] = target.url
        return Call(
            session,
            dialect,
            request,
            body,
            asked.outline,
            plan,
            sampling,
            served,
            target,
            response_id,
            identified_by=by,
            version=version,
            payer=caller.key,
            process=self.sessions.index,
        )

    async def count(self, parse: Callable[[bytes], Ask], body: bytes) -> int:
        """Tokens of the prompt of a request, as a conversation of its own would have it. Raises ApiError."""
        if not self.engines.names:
            raise ApiError(404, "The tokens of an upstream's prompts are not counted here", code="not_found")
        try:
            return await aside(len(body), self._counted, parse, body)
        except RenderError as error:
            raise _unwritten(error, "messages") from error

    def _counted(self, parse: Callable[[bytes], Ask], body: bytes) -> int:
        asked = parse(body)
        policy, _ = wanted(self.engines.names, asked.model)
        renderer = self.engines.of(policy or self.options.policy).renderer
        return len(renderer.render(messages_of(asked.turns), asked.tools, template_options(body)))

    async def chat(self, call: Call) -> bytes:
        """The whole response of a call, recorded. Raises ApiError."""
        # What may be very long is asked for piece by piece: read at once it would keep everybody else waiting.
        stream = call.most > WHOLE
        try:
            async with aclosing(self._sampled(call, stream=stream)) as chunks:
                async for chunk in chunks:
                    if stream:
                        async for _ in self._taken(call, chunk):
                            pass
                    else:
                        await aside(8 * len(chunk.token_ids), self._take, call, chunk)
                        await self._share(call, len(chunk.token_ids))
            self._check_version(call)
            with self.calling(call.session, call.response_id):
                response, each = await aside(call.told, call.dialect.responses, call)
        except asyncio.CancelledError:
            call.give_up()
            self._record(call)
            raise
        except ApiError:
            if call.first is not None:
                self._record(call)
            raise
        await self._record_by_turns(call, each)
        await self.recorder.kept(call.session, lost=call.lost)
        if any(choice.reason == ABORT for choice in call.choices):
            raise ApiError(503, "The engine aborted this reply: try again", type="server_error", code="engine_aborted")
        return response

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """The response of a call as server-sent events, those that are ready at once together. Raises ApiError before
        the first of them only."""
        recorded, writer = False, call.dialect.streamed(call)
        events: list[bytes] = []
        try:
            async with aclosing(self._sampled(call, stream=True)) as chunks:
                async for chunk in chunks:
                    async for choice, parts, tokens in self._taken(call, chunk):
                        events += [event.sse() for event in writer.take(choice, parts, tokens)]
                        if events and not call.finished:  # the last tokens leave with the end of the response
                            self._mark(call)
                            yield b"".join(events)
                            events.clear()
            self._check_version(call)
            with self.calling(call.session, call.response_id):
                _, each = await aside(call.told, call.dialect.responses, call)
            recorded = True
            await self._record_by_turns(call, each)
            await self.recorder.kept(call.session, lost=call.lost)
            yield b"".join([*events, *(event.sse() for event in writer.end())])
        except ApiError as error:
            if call.first is None:
                recorded = True
                raise
            if recorded or call.strayed:
                events.clear()  # no end of a reply that is none
            if not recorded:
                recorded = True
                self._record(call)
            yield b"".join([*events, call.dialect.failed(error).sse()])
        finally:
            if not recorded:
                self._record(call)

    def _mark(self, call: Call) -> None:
        """A part of a reply is about to be told before its record. Its episode begins now."""
        if not call.marked:
            call.marked = True
            # The mark first: a kill between the two leaves nothing that was begun and has no end.
            self.recorder.underway.begin(call.response_id, call.session.id)
            call.lost = not self.begun(call.session)

    @contextmanager
    def calling(self, session: GatewaySession, name: str) -> Iterator[None]:
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
        try:
            with self.calling(call.session, call.response_id):
                async with aclosing(self._chunks(call, stream=stream)) as chunks:
                    async for chunk in chunks:
                        yield chunk
        finally:
            if call.first is None:
                self.unbegun(call.session)

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
            logger.warning("%s of %s: %s", call.response_id, call.session.id, error)
            if answer.status >= 500:
                call.served.fleet.doubt(target)
            raise answer from error
        finally:
            target.running -= 1
            if call.first is None:
                call.session.lineages_of(call.policy).withdraw(call.plan)

    async def _taken(self, call: Call, chunk: Chunk) -> AsyncGenerator[tuple[Choice, list[Part], int], None]:
        """What a chunk adds to a call, and with how many tokens. Others have their turn after each `SLICE` of them.
        Raises ApiError like `_take`."""
        for piece in slices(chunk):
            choice, parts = self._take(call, piece)
            yield choice, parts, len(piece.token_ids)
            await self._share(call, len(piece.token_ids) * (1 + call.sampling.top_logprobs))

    @staticmethod
    async def _share(call: Call, tokens: int) -> None:
        """Others have their turn, where so much was done since they had it."""
        call.unshared += tokens
        if call.unshared >= SLICE:
            call.unshared = 0
            await asyncio.sleep(0)

    def _take(self, call: Call, chunk: Chunk) -> tuple[Choice, list[Part]]:
        """What a chunk adds to a call. Raises ApiError for what no engine should send."""
        try:
            return call.take(chunk)
        except Exception as error:
            logger.exception("%s: what %s sent cannot be read", call.response_id, call.target.url)
            raise ApiError(
                502, "The engine's reply cannot be read: try again", type="server_error", code="engine_unreadable"
            ) from error

    def _check_version(self, call: Call) -> None:
        """Raises ApiError like `Call.check_version`; an engine that is still said to serve the version is doubted."""
        try:
            call.check_version()
        except ApiError:
            logger.warning("%s of %s: another version from %s", call.response_id, call.session.id, call.target.url)
            if call.target.version == call.version:
                call.served.fleet.doubt(call.target)
            raise

    def _record(self, call: Call, responses: list[bytes] | None = None) -> None:
        """Fold every choice of a call, and write it. `responses`: what each record says the client got, where that is
        made already. Never raises: a reply is not lost to its client because it cannot be captured."""
        for _ in self._records(call, responses):
            pass

    async def _record_by_turns(self, call: Call, responses: list[bytes]) -> None:
        """`_record`, between whose choices others have their turn. Cancelling it leaves nothing unrecorded."""
        records = self._records(call, responses)
        with self.calling(call.session, call.response_id):
            await by_turns(records)

    def _records(self, call: Call, responses: list[bytes] | None) -> Iterator[Step]:
        """A step of `_record` for each choice, and before it one beside the loop where much is to be written; nothing
        happens between the last choice and the end."""
        session, plan, policy, underway = call.session, call.plan, call.policy, self.recorder.underway
        call.lost = not self.begun(session) or call.lost
        for at, choice in enumerate(call.choices):
            if at:
                yield None
            notes = call.spent(choice).note(call.payer)
            if at == len(call.choices) - 1:
                notes |= underway.note(call.response_id)
            try:
                reply = to_reply(choice.message())
                # Its caller may echo it, whatever becomes of its record.
                with_reply = match_keys.extend(plan.digests[-1], reply)
                self.sessions.replied(session, with_reply, reply)
                told = call.dialect.record(call, choice) if responses is None else responses[at]
                body, breach = call.record(choice, told, call.target.url)
                draft = None
                if len(call.body) + len(told) + len(plan.packed) >= LARGE:
                    draft = self.recorder.draft(session, "model_call", body, actor="policy", policy=policy)
                    stand = session.stand(policy)
                    yield draft.write
                    if session.stand(policy) != stand:  # another call of the session was recorded meanwhile
                        draft, (body, breach) = None, call.record(choice, told, call.target.url)
                # Folded before it is written: a start folds the same again.
                session.lineages_of(policy).apply(body, plan.messages, plan.digests, plan.hash, reply, plan.options)
            except Exception as error:
                logger.exception("%s of %s cannot be captured", call.response_id, session.id)
                session.forget()
                call.lost = True
                self.recorder.missed(session, "model_call", f"not recordable: {type(error).__name__}", notes)
                continue
            if breach is not None:
                logger.warning("%s of %s: %s from %s", call.response_id, session.id, breach, call.target.url)
                call.served.fleet.doubt(call.target)
            id = self.recorder.record(
                session,
                "model_call",
                body,
                actor="policy",
                event_time=call.when,
                draft=draft,
                notes=notes,
                policy=policy,
            )
            call.lost = call.lost or id is None
            if call.request.stored is not None and choice.reason != ABORT and (id or not self.recorder.required):
                self.sessions.stored.keep(call.response_id, session, call.request.stored, told)
            session.asks.called(plan.messages, call.when, plan.supersedes)
            session.asks.replied(call.response_id, reply, now_micros())
            if not at:
                self.followed_up(session, plan.messages, plan.digests)
            if id is not None:
                session.said_before(policy).recorded(id, call.outline)
                self.sessions.answered(session, call.response_id, with_reply)
            session.said = reply["content"] or session.said
            _calls.add(1, finish=choice.reason)
            _tokens.add(len(choice.ids))
        underway.done(call.response_id)

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

    def begun(self, session: GatewaySession) -> bool:
        """An episode that nobody asked for begins with the first record of a call. False: its start is lost."""
        return session.step > 0 or self.begin(session)

    def unbegun(self, session: GatewaySession) -> None:
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
        while session.busy and not session.ended:
            running = list(session.calls.values())
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=ENDING_S)
        if session.ended:
            await self.recorder.durable(session)
            return
        start = session.start
        body: EpisodeEnded = {
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
        self.recorder.accept(session, "episode_ended", body, actor="agent")
        session.ended = True
        self.sessions.retire(session)
        await self.recorder.durable(session)

    async def drain(self, timeout_s: float) -> None:
        """Wait for the calls in flight, then cut them off: each is recorded as far as it came."""
        for patience in (timeout_s, ENDING_S):
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
            self.sessions.stored.sweep(now_micros())
            for session in self.sessions.idle(self.options.idle_timeout_s):
                await asyncio.sleep(0)  # there may be thousands
                if not session.silent(self.options.idle_timeout_s) or session.ended:
                    continue
                if session.step == 0:
                    self.sessions.discard(session)
                    continue
                status: EpisodeStatus = "abandoned" if session.granted else "completed"
                with suppress(ApiError):  # the log is full: it is as idle at the next look
                    await self.end(session, status=status, stop_condition="idle")


def _ended(session: GatewaySession) -> ApiError:
    return ApiError(403, f"Session {session.id} has ended: start a new one", code="session_ended")


def _unwritten(error: RenderError, asked_in: str) -> ApiError:
    """The template does not write these messages, or the context does not hold them."""
    if isinstance(error, PromptTooLong):
        return too_long(asked_in)
    return ApiError(400, str(error), param=asked_in, code="unsupported_messages")


def _unserved(error: EngineError) -> ApiError:
    """No engine could be given the call: the client may try again."""
    logger.warning("no engine for a call: %s", error)
    return ApiError(503, str(error), type="server_error", code="no_engine", retry_after_s=1)
