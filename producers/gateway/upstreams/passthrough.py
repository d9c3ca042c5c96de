"""Calls that an upstream answers, which gives text and no token ids: captured, and never trainable by RL.

Invariants: the request goes on byte for byte, but for the name of its model where its rule says another, and the answer
comes back byte for byte, refusals included; the caller's key is never passed on; the assembled reply is in the capture
log before the last byte of what ends it leaves, or, where capture is required and it cannot be, that byte does not
leave; a stream that breaks off, or whose client left, is recorded as aborted; an answer that succeeded leaves one
record or one gap for each of its choices, and one that cannot be read, or whose request cannot, a gap, and is passed on
all the same; no call is sent again once its client got a byte; a call that names an earlier response is recorded with
the whole conversation, or as one that is not whole."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

from starlette.responses import Response

from millrace.dialects import match_keys
from millrace.dialects.answers import AnswerChoice, WholeAnswer
from millrace.dialects.base import Dialect
from millrace.dialects.errors import ApiError, of_engine
from millrace.dialects.reading.events import ReplyEvents
from millrace.dialects.reading.head import RequestHead, renamed
from millrace.dialects.reading.reader import DialectReader, NamedBefore, ReadAnswer, ReadRequest
from millrace.dialects.recall import Recalled, ResponseOrigin
from millrace.infra.engines.base import ABORT
from millrace.infra.engines.upstream import (
    NOT_WHOLE,
    UNTRAINABLE,
    StreamedReply,
    TextServer,
    UpstreamReply,
    succeeded,
)
from millrace.infra.errors import EngineError, EngineTimeout, EngineUnavailable
from millrace.infra.process.offload import Step, aside, by_turns
from millrace.producers.gateway.calls.gateway import Gateway
from millrace.producers.gateway.http.callers import Caller
from millrace.producers.gateway.prices import Usage, cost
from millrace.producers.gateway.sessions.ownership import hints
from millrace.producers.gateway.sessions.recorder import LARGE
from millrace.producers.gateway.sessions.session import GatewaySession
from millrace.producers.gateway.spending import Spent, borne, spent
from millrace.producers.gateway.upstreams.cut import Cut
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.sending import R, first_answer
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams
from millrace.schemas.arrays import empty
from millrace.schemas.ids import new_id, now_micros
from millrace.schemas.records import ModelCall
from millrace.schemas.requests import RequestOutline, outlined

logger = logging.getLogger(__name__)

PIECE = 8 << 10
"""bytes of a stream that are read in one go"""
TOGETHER = 16 << 20
"""bytes that the records of one answer's choices may have, each of which holds the request and the whole answer"""
ASKED_WITH = ("anthropic-version", "anthropic-beta", "openai-beta")
"""headers of a request that say how it is meant, and go on"""
ONCE = "idempotency-key"
BROKE_OFF = "the upstream broke off its answer"
"""of an answer that was not streamed, of which its client was told nothing"""
NO_ANSWER = WholeAnswer("", [], (0, 0, 0))


@dataclass(slots=True)
class Passed:
    """One call on its way. `sent`: the body as upstreams get it, `body`: as it is recorded. `headers`: those that go on
    to every upstream, `given`: all that came. `asked`: None for a request that nobody here reads; `named`: what it
    names of what was said before; `recalled`: what it may name."""

    session: GatewaySession
    reader: DialectReader
    dialect: Dialect
    rule: RouteRule
    head: RequestHead
    body: bytes
    sent: bytes
    path: str
    headers: Mapping[str, str]
    given: Mapping[str, str]
    asked: ReadRequest | None
    outline: RequestOutline | None
    upstream: Upstream
    identified_by: str
    recalled: Recalled
    named: NamedBefore | None = None
    name: str = field(default_factory=new_id)
    began: float = field(default_factory=time.perf_counter)
    when: int = field(default_factory=now_micros)
    first: float | None = None
    marked: bool = False
    """whether it is marked as under way"""
    lost: bool = False
    """whether a record of it could not be written"""
    payer: str = ""
    """the name of the key that bears it"""
    supersedes: str | None = None
    """the response to the same request before"""
    broken: list[int] = field(default_factory=list)
    """bytes that came of each answer that broke off before its client got a byte: another attempt followed, or none"""

    @property
    def before(self) -> bytes:
        """The digest of the conversation that the request holds."""
        return self.asked.digests[-1] if self.asked else b""

    @property
    def whole(self) -> bool:
        """Whether the conversation is known here."""
        return self.named is None or self.named.whole

    def origin(self, *, whole: bool = True) -> ResponseOrigin:
        """Where its response is kept. `whole`: it came to its end."""
        return ResponseOrigin(self.upstream.name, self.upstream.keeps(self.dialect.name), self.whole and whole)

    def for_upstream(self, upstream: Upstream) -> bytes:
        """What an upstream is sent: as it came, but where it names, and is known to name, what only others have."""
        named = self.named
        if named is None or not named.whole or not upstream.keeps(self.dialect.name):
            return self.sent
        if all(kept.origin.away and kept.origin.by == upstream.name for kept in named.used):
            return self.sent
        whole = self.reader.flattened(named.body)
        return renamed(whole, self.rule.send_as) if self.rule.send_as else whole


class PassedAnswer(NamedTuple):
    """An answer as it is recorded: the response, and what it says, None where nobody here can read it. `size`: bytes
    that came; `unread`: parts of a stream that could not be read, of `unread_bytes`; `finish`: why it ended, where that
    is not for it to say; `why`: what is wrong with it, where that is known."""

    response: bytes
    read: ReadAnswer | None
    size: int
    unread: int = 0
    unread_bytes: int = 0
    finish: str | None = None
    streamed: bool = False
    why: str = ""


class Bill(NamedTuple):
    """What all records of a call add, and what the first of them says that it cost: None where nobody knows."""

    spent: Spent
    cost: float | None


class Passthrough:
    """Calls of `gateway` answered by `upstreams`."""

    def __init__(self, gateway: Gateway, upstreams: Upstreams) -> None:
        self.gateway = gateway
        self.upstreams = upstreams

    async def prepare(
        self,
        caller: Caller,
        headers: Mapping[str, str],
        body: bytes,
        head: RequestHead,
        rule: RouteRule,
        reader: DialectReader,
        dialect: Dialect,
        query: str = "",
    ) -> Passed:
        """Whose call it is. Raises ApiError."""
        users, name = dialect.names(head)
        recalled = partial(self.gateway.recall, caller, headers)
        sent = await aside(len(body), renamed, body, rule.send_as) if rule.send_as else body
        named = await aside(len(body), reader.named, body, partial(recalled, users))
        body = body if named is None else named.body
        asked, outline = await aside(len(body), _understood, reader, body, named is None or named.whole)
        await self.gateway.check_serves(caller)
        messages, digests, _ = asked or ReadRequest([], match_keys.chain([], None))
        said = hints(headers, *users, name=name, field=dialect.names_in)
        used = () if named is None else named.used
        session, _, by = self.gateway.called(caller, said, messages, digests, used)
        self.gateway.sessions.stored.touch(used)
        upstream = self.upstreams.chain(rule, dialect.name)[0]
        path = f"{reader.path}?{query}" if query else reader.path
        with_headers = asked_with(headers, session.tenant, session.subject)
        return Passed(
            session,
            reader,
            dialect,
            rule,
            head,
            body,
            sent,
            path,
            with_headers,
            headers,
            asked,
            outline,
            upstream,
            by,
            recalled,
            named,
            payer=caller.key,
        )

    async def answer(self, call: Passed) -> Response:
        """The upstream's whole answer."""
        answered = False
        try:
            with self.gateway.calling(call.session, call.name):
                answer = await self._sent(call, _ask)
                read = await aside(len(answer.body), call.reader.answer, answer.body, call.before)
            answered = succeeded(answer.status)
            if call.broken and not answered:
                await self._record(call, PassedAnswer(b"", None, call.broken.pop(), why=BROKE_OFF))
        except EngineError as error:
            if call.broken:  # it was made, at least in part, and is paid for
                answered = True
                why = "" if isinstance(error, EngineUnavailable) and succeeded(error.status or 0) else BROKE_OFF
                await self._record(call, PassedAnswer(b"", None, call.broken.pop(), why=why))
            raise self._failed(call, error) from error
        except asyncio.CancelledError:
            self._abort(call, call.reader.assembled())
            raise
        finally:
            if not answered:
                self.gateway.unbegun(call.session)
        if answered:
            with self.gateway.calling(call.session, call.name):
                await self._record(call, PassedAnswer(answer.body, read, len(answer.body)))
            await self.gateway.recorder.kept(call.session, lost=call.lost)
        return Response(answer.body, answer.status, dict(answer.headers))

    async def open(self, call: Passed) -> StreamedReply | UpstreamReply:
        """The upstream's answer to a streamed call, as soon as its status is known; a refusal whole."""
        opened = False
        try:
            with self.gateway.calling(call.session, call.name):
                answer = await self._sent(call, _stream)
                opened = succeeded(answer.status)
                if not opened:
                    async with answer:
                        return await answer.whole()
        except EngineError as error:
            raise self._failed(call, error) from error
        except asyncio.CancelledError:
            self._abort(call, call.reader.assembled())
            raise
        finally:
            if not opened:
                self.gateway.unbegun(call.session)
        return answer

    async def _sent(self, call: Passed, send: Callable[[TextServer, str, bytes, Mapping[str, str]], Awaitable[R]]) -> R:
        """The first answer that no other attempt may better. Raises EngineError where the last attempt got none."""

        async def to(upstream: Upstream) -> R:
            call.upstream = upstream
            body = await aside(len(call.body), call.for_upstream, upstream)
            headers = {**call.headers, **upstream.headers_of(call.given)}
            try:
                return await send(upstream.client, call.path, body, headers)
            except (EngineUnavailable, EngineTimeout) as error:
                if error.received or (isinstance(error, EngineUnavailable) and succeeded(error.status or 0)):
                    call.broken.append(error.received)
                raise

        chain = self.upstreams.chain(call.rule, call.dialect.name, call.recalled)
        return await first_answer(chain, to, call.session.id, self.upstreams.first_s)

    def _failed(self, call: Passed, error: EngineError) -> ApiError:
        logger.warning("a call of %s failed: %s", call.session.id, error)
        return of_engine(error)

    async def left(self, call: Passed, answer: StreamedReply) -> None:
        """Nobody reads the stream: it is closed, and the call recorded as aborted."""
        try:
            async with answer:
                pass
        finally:
            self._abort(call, call.reader.assembled())

    async def stream(self, call: Passed, answer: StreamedReply) -> AsyncGenerator[bytes, None]:
        """The bytes as they come; the last of them after the call is recorded."""
        with self.gateway.calling(call.session, call.name):
            async with aclosing(self._stream(call, answer)) as parts:
                async for part in parts:
                    yield part

    async def _stream(self, call: Passed, answer: StreamedReply) -> AsyncGenerator[bytes, None]:
        # Whole events only, so that an error event can follow any of them; what may be the last waits until more comes.
        assembled, cut, held, done = call.reader.assembled(), Cut(), b"", False
        try:
            async with answer:
                async for part in answer.chunks():
                    call.first = call.first or time.perf_counter()
                    for at in range(0, len(part), PIECE):
                        assembled.feed(part[at : at + PIECE])
                        if len(part) > PIECE:
                            await asyncio.sleep(0)  # others have their turn
                    if events := cut.feed(part):
                        if held:
                            self._mark(call)
                            yield held
                        held = events if assembled.closing else b""
                        if not held:
                            self._mark(call)
                            yield events
            told = await aside(assembled.size, _told, call, assembled, answer.counted)
            done = True
            await self._record(call, told)
            await self.gateway.recorder.kept(call.session, lost=call.lost)
            yield held + bytes(cut.rest)
        except ApiError as error:  # not captured, and so not told to its end
            yield call.dialect.failed(error).sse()
        except EngineError as error:
            assembled.finish = ABORT
            told = await aside(assembled.size, _told, call, assembled, answer.counted)
            done = True
            await self._record(call, told)
            yield held + call.dialect.failed(self._failed(call, error)).sse()
        finally:
            if not done:
                self._abort(call, assembled, answer.counted)

    def _mark(self, call: Passed) -> None:
        """A part of an answer is about to be told before its record. Its episode begins now."""
        if not call.marked:
            call.marked = True
            self.gateway.recorder.underway.begin(call.name, call.session.id)  # first, as in `Gateway`
            call.lost = not self.gateway.begun(call.session)

    def _abort(self, call: Passed, events: ReplyEvents, counted: Usage | None = None) -> None:
        events.finish = ABORT
        for _ in self._records(call, _told(call, events, counted)):
            pass

    async def _record(self, call: Passed, told: PassedAnswer) -> None:
        """Every choice of an answer into the log, between which others have their turn; a gap for one that cannot be
        read. Never raises; cancelling it leaves nothing unrecorded."""
        await by_turns(self._records(call, told))

    def _records(self, call: Passed, told: PassedAnswer) -> Iterator[Step]:
        session, recorder, read, response = call.session, self.gateway.recorder, told.read, told.response
        call.lost = not self.gateway.begun(session) or call.lost
        mark = recorder.underway.note(call.name)  # beside the last
        bill = _bill(call, told)
        notes = bill.spent.note(call.payer)  # beside the first thing that the log takes of the call
        if call.asked is not None and call.asked.stored is not None:
            notes |= call.origin().note()
        if call.asked is None or read is None or not read.answer.choices:
            what = "the request" if call.asked is None else "the upstream's answer"
            logger.warning("%s: %s is none of %s that can be read", session.id, what, call.dialect.name)
            reason = told.why or f"{what} is none of {call.dialect.name} that can be read"
            recorder.missed(session, "model_call", reason, notes | mark)
            recorder.underway.done(call.name)
            return
        turn = self._turn(call, read.answer.id)
        size = len(call.body) + len(response)
        room = max(1, TOGETHER // size)
        choices = list(zip(read.answer.choices[:room], read.digests, strict=False))
        for at, (said, digest) in enumerate(choices):
            if at and size < LARGE:
                yield None
            if at == len(choices) - 1:
                notes |= mark
            try:
                body, draft = (
                    self._body(call, told, read.answer, said, turn, 0.0 if at and bill.cost else bill.cost),
                    None,
                )
                if size >= LARGE:
                    draft = recorder.draft(session, "model_call", body, actor="policy")
                    yield draft.write
            except Exception as error:  # whatever it is, the client has its answer, and the next choice its record
                logger.exception("a choice of a call of %s cannot be captured", session.id)
                call.lost = True
                recorder.missed(session, "model_call", f"not recordable: {type(error).__name__}", notes)
                notes = {}
                continue
            id = recorder.record(
                session, "model_call", body, actor="policy", event_time=call.when, draft=draft, notes=notes
            )
            notes = {}
            call.lost = call.lost or id is None
            if id is not None:
                session.said_before(session.policy).recorded(id, call.outline)
            try:
                if id or not recorder.required:
                    self._keep(call, told, read.answer.id, said)
                self._known(call, call.asked, read.answer.id, said, digest, recorded=id is not None, first=not at)
            except Exception:  # the call is recorded: only what later calls may say of it is lost
                logger.exception("%s: what a choice said cannot be looked into", session.id)
        if told.unread:
            reason = f"{told.unread} parts of the upstream's stream could not be read"
            recorder.missed(session, "model_call", reason)
        if len(read.answer.choices) > room:
            reason = f"{len(read.answer.choices) - room} of the upstream's choices are more than a record holds"
            recorder.missed(session, "model_call", reason)
        recorder.underway.done(call.name)
        session.touch()

    def _keep(self, call: Passed, told: PassedAnswer, id: str, said: AnswerChoice) -> None:
        """Its caller may name the response from now on, also one that did not come to its end: to ask for that."""
        assert call.asked is not None
        origin = call.origin(whole=(told.finish or said.finish or ABORT) != ABORT)
        if call.asked.stored is not None and (origin.away or origin.whole):
            self.gateway.sessions.stored.keep(id, call.session, call.asked.stored, told.response, origin=origin)

    def _turn(self, call: Passed, id: str) -> int:
        """Which turn an answer of this id is: that of the former one, where its client asks once more for a response
        that is kept."""
        session, turn = call.session, call.session.turns
        if call.asked is not None and call.asked.stored is not None:
            hash = match_keys.request_hash(call.body)
            former = session.lineages.former(hash)
            if former is not None and former.response != id:
                turn, call.supersedes = former.turn, former.response
            session.lineages.served(hash, id, turn)
        session.lineages.turns = max(session.turns, turn + 1)
        return turn

    def _known(
        self,
        call: Passed,
        asked: ReadRequest,
        id: str,
        said: AnswerChoice,
        digest: bytes,
        *,
        recorded: bool,
        first: bool,
    ) -> None:
        """The session knows a choice, as a start makes it know it."""
        session = call.session
        session.asks.called(asked.messages, call.when, call.supersedes)
        session.asks.replied(id, said.message, now_micros())
        if first:
            self.gateway.followed_up(session, asked.messages, asked.digests)
        if recorded:
            self.gateway.sessions.answered(session, id, digest)
        session.said = said.message["content"] or session.said
        self.gateway.sessions.replied(session, digest)

    def _body(
        self, call: Passed, told: PassedAnswer, answer: WholeAnswer, said: AnswerChoice, turn: int, cost: float | None
    ) -> ModelCall:
        now = time.perf_counter()
        prompt, completion, cached = answer.usage
        stored = call.session.said_before(call.session.policy).stored(call.body, call.outline)
        return {
            "call_id": new_id(),
            "response_id": answer.id,
            "choice": said.choice,
            "lineage": new_id(),
            "opened": UNTRAINABLE if call.whole else NOT_WHOLE,
            "supersedes": call.supersedes,
            "turn": turn,
            "prefix_len": 0,
            "prompt_ids": empty("int32"),
            "output_ids": empty("int32"),
            "output_logprobs": empty("float32"),
            "output_versions": empty("int32"),
            "request": stored.request,
            "response": told.response,
            "sampling": call.head.sampling(),
            "finish_reason": told.finish or said.finish or ABORT,
            "stop_condition": None,
            "engine": call.upstream.engine,
            "engine_version": call.upstream.client.base_url,
            "engine_incarnation": "",
            "tokenizer_hash": "",
            "template_hash": "",
            "usage": {"prompt": prompt, "completion": completion, "cached": cached},
            "cost": cost,
            "latency_us": int((now - call.began) * 1e6),
            "ttft_us": int(((call.first or now) - call.began) * 1e6),
            "trainable": False,
            "untrainable_reason": UNTRAINABLE,
            "identified_by": call.identified_by,
            "request_base": stored.base,
            "request_kept": stored.kept,
        }


def _told(call: Passed, events: ReplyEvents, counted: Usage | None = None) -> PassedAnswer:
    """What a stream amounts to so far. `counted`: its tokens, where somebody knows better than its events."""
    response, read = call.reader.whole(events, call.before)
    if read is not None and counted is not None:
        read.answer = read.answer._replace(usage=counted)
    return PassedAnswer(response, read, events.size, events.unread, events.unread_bytes, events.finish, streamed=True)


def _bill(call: Passed, told: PassedAnswer) -> Bill:
    """What a call bears: what its upstream counted, which is final for an answer that came to its end; in place of what
    is not known an estimate, of which no record says that it is the cost."""
    read, answer = told.read, told.read.answer if told.read else NO_ANSWER
    aborted = any((told.finish or said.finish or ABORT) == ABORT for said in answer.choices)
    size = read.size + told.unread_bytes if read and answer.choices else told.size
    final = not (told.streamed and aborted)
    usage = borne(answer.usage, len(call.body), size, final=final)
    known = final and usage == answer.usage
    bill = spent(call.rule.prices, usage)
    for received in call.broken:
        lost = spent(call.rule.prices, borne((0, 0, 0), len(call.body), received))
        bill = Spent(bill.tokens + lost.tokens, bill.money + lost.money)
    return Bill(bill, cost(call.rule.prices, usage) if known else None)


def _ask(server: TextServer, path: str, body: bytes, headers: Mapping[str, str]) -> Awaitable[UpstreamReply]:
    return server.ask(path, body, headers)


def _stream(server: TextServer, path: str, body: bytes, headers: Mapping[str, str]) -> Awaitable[StreamedReply]:
    return server.stream(path, body, headers)


def _understood(reader: DialectReader, body: bytes, whole: bool) -> tuple[ReadRequest | None, RequestOutline | None]:
    try:
        return reader.asked(body, whole=whole), outlined(body)
    except (ApiError, ValueError):
        return None, None


def asked_with(headers: Mapping[str, str], tenant: str, subject: str) -> dict[str, str]:
    """The headers of a request that go on with it. All callers share one key of an upstream: an `idempotency-key`
    is made one of its tenant and end user."""
    out = {name: headers[name] for name in ASKED_WITH if name in headers}
    if ONCE in headers:
        said = [part.encode(errors="surrogatepass") for part in (tenant, subject, headers[ONCE])]
        digest = blake2b(digest_size=32)
        for part in said:
            digest.update(b"%d " % len(part) + part)
        out[ONCE] = digest.hexdigest()
    return out
