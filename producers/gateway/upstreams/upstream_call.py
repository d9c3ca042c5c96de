"""A call that an upstream answers, which gives text and no token ids: captured, and never trainable by RL.

Invariants: the request goes on byte for byte, but for the name of its model where its rule says another, and the answer
comes back byte for byte, refusals included; an answer that succeeded leaves one record or one gap for each of its
choices, and one that cannot be read, or whose request cannot, a gap, and is passed on all the same; no call is sent
again once its client got a byte; a call that names an earlier response is recorded with the whole conversation, or as
one that is not whole."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from millrace.dialects import match_keys
from millrace.dialects.answers import WholeAnswer
from millrace.dialects.errors import ApiError, of_engine
from millrace.dialects.reading.events import ReplyEvents
from millrace.dialects.reading.head import RequestHead, rename_model
from millrace.dialects.reading.reader import DialectReader, NamedBefore, ReadAnswer, ReadRequest
from millrace.dialects.rendering.base import Message
from millrace.dialects.stored_responses import Recaller, ResponseOrigin
from millrace.infra.engines.base import ABORT
from millrace.infra.engines.upstream import NOT_WHOLE, UNTRAINABLE, StreamedReply, TextServer, UpstreamReply, is_success
from millrace.infra.errors import EngineError, EngineTimeout, EngineUnavailable
from millrace.infra.process.offload import run_aside
from millrace.producers.gateway.calls.call import AnsweredBy, Call, WholeReply, model_call
from millrace.producers.gateway.prices import Prices, cost
from millrace.producers.gateway.sessions.reply_index import ChoiceReply
from millrace.producers.gateway.spending import Expense, bill_usage, expense_of
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.sending import R, first_answer
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams
from millrace.schemas import bounds
from millrace.schemas.records import ModelCall

logger = logging.getLogger(__name__)

PIECE = 8 << 10
"""bytes of a stream that are read in one go"""
TOGETHER = 16 << 20
"""bytes that the records of one answer's choices may have, each of which holds the request and the whole answer"""
BROKE_OFF = "the upstream broke off its answer"
"""of an answer that was not streamed, of which its client was told nothing"""
ENDS = (b"\n\n", b"\r\n\r\n")
OVERLAP = max(map(len, ENDS)) - 1
"""bytes of an end that may have come before the part that completes it"""
NO_ANSWER = WholeAnswer("", [], (0, 0, 0))


class Cut:
    """A stream of server-sent events in pieces that end where events end, so that an event of ours can follow any of
    them. `rest`: the bytes of the event whose end did not come.

    Invariants: no byte is lost, added or moved; what is searched of each part is the part and the few bytes before it,
    however long the event is that it belongs to; an event longer than `EVENT_BYTES` is not held back."""

    def __init__(self) -> None:
        self.rest = bytearray()

    def feed(self, part: bytes) -> bytes:
        """The whole events that are there with these bytes, b"" where there is none."""
        start = max(0, len(self.rest) - OVERLAP)
        self.rest += part
        at = start + behind(bytes(self.rest[start:]))
        if at == start:
            at = 0
        if len(self.rest) - at > bounds.EVENT_BYTES:
            at = len(self.rest)
        events = bytes(self.rest[:at])
        del self.rest[:at]
        return events


def behind(data: bytes) -> int:
    """Where the last event ends that does; 0 where none does."""
    return max((at + len(end) for end in ENDS if (at := data.rfind(end)) >= 0), default=0)


@dataclass(slots=True, eq=False, kw_only=True)
class UpstreamCall(Call):
    """One of them. `sent_body`: the body as upstreams get it, `body`: as it is recorded. `headers`: those that go on to
    every upstream, `all_headers`: all that came. `request`: None for one that nobody reads; `named_before`: what it
    names of what was said before; `recall`: what it may name."""

    upstreams: Upstreams
    reader: DialectReader
    rule: RouteRule
    head: RequestHead
    sent_body: bytes
    path: str
    headers: Mapping[str, str]
    all_headers: Mapping[str, str]
    request: ReadRequest | None
    upstream: Upstream
    recall: Recaller
    named_before: NamedBefore | None = None
    supersedes: str | None = None
    """the response to the same request before"""
    broken_bytes: list[int] = field(default_factory=list)
    """bytes that came of each answer that broke off before its client got a byte: another attempt followed, or none"""
    stream: StreamedReply | None = None
    facts: AnswerFacts | None = None
    """what its records are made of"""
    _events: ReplyEvents = field(init=False)
    _waiting: bytes = b""
    """what may be the last of a stream"""
    _cut: Cut = field(default_factory=Cut)
    _bill: Bill | None = None
    _turn: int | None = None

    def __post_init__(self) -> None:
        self._events = self.reader.assembler()

    @property
    def streams(self) -> bool:
        return self.head.stream is True

    @property
    def policy(self) -> str:
        return self.session.policy

    @property
    def is_answered(self) -> bool:
        return self.facts is not None or self.stream is not None

    @property
    def messages(self) -> Sequence[Message]:
        return self.request.messages if self.request else ()

    @property
    def digests(self) -> Sequence[bytes]:
        return self.request.digests if self.request else ()

    @property
    def replaces(self) -> str | None:
        return self.supersedes

    @property
    def before(self) -> bytes:
        """The digest of the conversation that the request holds."""
        return self.digests[-1] if self.digests else b""

    @property
    def is_whole(self) -> bool:
        """Whether the conversation is known here."""
        return self.named_before is None or self.named_before.whole

    def origin(self, *, is_complete: bool = True) -> ResponseOrigin:
        """Where its response is kept. `is_complete`: it came to its end."""
        return ResponseOrigin(self.upstream.name, self.upstream.keeps(self.dialect.name), self.is_whole and is_complete)

    # ------------------------------------------------------------------ its answer

    async def answer(self) -> WholeReply:
        try:
            answer = await self._send(_ask)
            read = await run_aside(len(answer.body), self.reader.answer, answer.body, self.before)
        except EngineError as error:
            if self.broken_bytes:  # it was made, at least in part, and is paid for
                is_long = isinstance(error, EngineUnavailable) and is_success(error.status or 0)
                self.facts = AnswerFacts(b"", None, self.broken_bytes.pop(), fault="" if is_long else BROKE_OFF)
            raise self._failure(error) from error
        if is_success(answer.status):
            self.facts = AnswerFacts(answer.body, read, len(answer.body))
        elif self.broken_bytes:
            self.facts = AnswerFacts(b"", None, self.broken_bytes.pop(), fault=BROKE_OFF)
        return WholeReply(answer.body, answer.status, answer.headers)

    async def open(self) -> WholeReply | None:
        try:
            answer = await self._send(_stream)
            if is_success(answer.status):
                self.stream = answer
                return None
            async with answer:
                refusal = await answer.read_all()
                return WholeReply(refusal.body, refusal.status, refusal.headers)
        except EngineError as error:
            raise self._failure(error) from error

    def stream_head(self) -> WholeReply | None:
        assert self.stream is not None
        headers = dict(self.stream.headers)
        if "json" in headers.get("content-type", ""):  # what is said all the same becomes a stream: `as_stream`
            headers["content-type"] = "text/event-stream"
        return WholeReply(b"", self.stream.status, headers)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        # Whole events only, so that an error event can follow any of them; what may be the last waits until more comes.
        assert self.stream is not None
        try:
            async with self.stream as answer:
                async for part in self.dialect.as_stream(answer.chunks()):
                    self.first = self.first or time.perf_counter()
                    for at in range(0, len(part), PIECE):
                        self._events.feed(part[at : at + PIECE])
                        if len(part) > PIECE:
                            await asyncio.sleep(0)  # others have their turn
                    if events := self._cut.feed(part):
                        if self._waiting:
                            waiting, self._waiting = self._waiting, b""
                            yield waiting
                        if self._events.closing:
                            self._waiting = events
                        else:
                            yield events
        except EngineError as error:
            self._events.finish = ABORT
            await self.close()
            raise self._failure(error) from error

    async def close(self) -> None:
        if self._events.error:
            logger.warning("a call of %s was ended by its upstream: %s", self.session.id, self._events.error)
        self.facts = await run_aside(self._events.size, self._facts_so_far)

    def rest(self) -> bytes:
        return self._waiting

    def end(self) -> bytes:
        return self._waiting + bytes(self._cut.rest)

    def break_off(self, *, is_unread: bool) -> None:
        if self.stream is not None:
            self.stream.close()
        self._events.finish = ABORT
        self.facts = self._facts_so_far()

    def _facts_so_far(self) -> AnswerFacts:
        """What a stream amounts to so far."""
        events = self._events
        response, read = self.reader.whole(events, self.before)
        usage = self.stream.usage_so_far if self.stream is not None else None
        if read is not None and usage is not None:  # somebody knows its tokens better than its events
            read.answer = read.answer._replace(usage=usage)
        return AnswerFacts(response, read, events.size, events.unread, events.unread_bytes, events.finish, True)

    async def _send(self, send: Callable[[TextServer, str, bytes, Mapping[str, str]], Awaitable[R]]) -> R:
        """The first answer that no other attempt may better. Raises EngineError where the last attempt got none."""

        async def to(upstream: Upstream) -> R:
            self.upstream = upstream
            body = await run_aside(len(self.body), self._for_upstream, upstream)
            headers = {**self.headers, **upstream.headers_of(self.all_headers)}
            try:
                return await send(upstream.client, self.path, body, headers)
            except (EngineUnavailable, EngineTimeout) as error:
                if error.received or (isinstance(error, EngineUnavailable) and is_success(error.status or 0)):
                    self.broken_bytes.append(error.received)
                raise

        chain = self.upstreams.chain(self.rule, self.dialect.name, self.recall)
        return await first_answer(chain, to, self.session.id, self.upstreams.first_s)

    def _for_upstream(self, upstream: Upstream) -> bytes:
        """What an upstream is sent: as it came, but where it names, and is known to name, what only others have."""
        former = self.named_before
        if former is None or not former.whole or not upstream.keeps(self.dialect.name):
            return self.sent_body
        if all(
            stored_response.origin.away and stored_response.origin.by == upstream.name
            for stored_response in former.used
        ):
            return self.sent_body
        full_body = self.reader.flatten(former.body)
        return rename_model(full_body, self.rule.send_as) if self.rule.send_as else full_body

    def _failure(self, error: EngineError) -> ApiError:
        logger.warning("a call of %s failed: %s", self.session.id, error)
        return of_engine(error)

    # ------------------------------------------------------------------ its records

    @property
    def _answer(self) -> WholeAnswer:
        return NO_ANSWER if self.facts is None else self.facts.answer

    def unreadable(self) -> str | None:
        assert self.facts is not None
        if self.request is not None and self._answer.choices:
            return None
        part = "the request" if self.request is None else "the upstream's answer"
        return self.facts.fault or f"{part} is none of {self.dialect.name} that can be read"

    @property
    def count(self) -> int:
        assert self.facts is not None
        return min(len(self._answer.choices), max(1, TOGETHER // self._size))

    @property
    def _size(self) -> int:
        assert self.facts is not None
        return len(self.body) + len(self.facts.response)

    def size(self, reply: ChoiceReply) -> int:
        return self._size

    def spending(self, at: int) -> dict[str, str]:
        if at:
            return {}
        notes = self._make_bill().expense.note(self.payer)
        if self.request is not None and self.request.stored is not None:
            notes |= self.origin().note()
        return notes

    def reply(self, at: int) -> ChoiceReply:
        facts, choice = self.facts, self._answer.choices[at]
        assert facts is not None
        assert facts.read is not None
        assert self.request is not None
        finish = facts.finish or choice.finish or ABORT
        # Its caller may name it also where it did not come to its end: to ask for that.
        origin = self.origin(is_complete=finish != ABORT)
        return ChoiceReply(
            self._answer.id,
            choice.choice,
            choice.message,
            facts.read.digests[at],
            facts.response,
            finish,
            self.request.stored if origin.away or origin.whole else None,
            origin,
        )

    def record(self, at: int, reply: ChoiceReply) -> tuple[ModelCall, str | None]:
        bill = self._make_bill()
        body = model_call(
            self,
            reply,
            AnsweredBy(self.upstream.engine, self.upstream.client.base_url),
            turn=self._turn_of(reply.id),
            opening=UNTRAINABLE if self.is_whole else NOT_WHOLE,
            sampling=self.head.sampling(),
            usage=self._answer.usage,
            cost=0.0 if at and bill.cost else bill.cost,
        )
        return body, None

    def gaps(self) -> list[str]:
        assert self.facts is not None
        out, surplus = [], len(self._answer.choices) - self.count
        if self.facts.unread:
            out.append(f"{self.facts.unread} parts of the upstream's stream could not be read")
        if surplus:
            out.append(f"{surplus} of the upstream's choices are more than a record holds")
        return out

    def _turn_of(self, id: str) -> int:
        """Which turn an answer of this id is: that of the former one, where its client asks once more for a response
        that is kept."""
        if self._turn is not None:
            return self._turn
        session, turn = self.session, self.session.turns
        if self.request is not None and self.request.stored is not None:
            hash = match_keys.request_hash(self.body)
            former = session.lineages.former(hash)
            if former is not None and former.response != id:
                turn, self.supersedes = former.turn, former.response
            session.lineages.note_answer(hash, id, turn)
        session.lineages.turns = max(session.turns, turn + 1)
        self._turn = turn
        return turn

    def _make_bill(self) -> Bill:
        if self._bill is None:
            assert self.facts is not None
            self._bill = bill_of(self.facts, len(self.body), self.rule.prices, self.broken_bytes)
        return self._bill


def _ask(server: TextServer, path: str, body: bytes, headers: Mapping[str, str]) -> Awaitable[UpstreamReply]:
    return server.ask(path, body, headers)


def _stream(server: TextServer, path: str, body: bytes, headers: Mapping[str, str]) -> Awaitable[StreamedReply]:
    return server.stream(path, body, headers)


class AnswerFacts(NamedTuple):
    """An answer as it is recorded: the response, and what it says, None where nobody here can read it. `size`: bytes
    that came; `unread`: parts of a stream that could not be read, of `unread_bytes`; `finish`: why it ended, where that
    is not for it to say; `fault`: what is wrong with it, where that is known."""

    response: bytes
    read: ReadAnswer | None
    size: int
    unread: int = 0
    unread_bytes: int = 0
    finish: str | None = None
    is_streamed: bool = False
    fault: str = ""

    @property
    def answer(self) -> WholeAnswer:
        """What it says; nothing where nobody can read it."""
        return NO_ANSWER if self.read is None else self.read.answer


class Bill(NamedTuple):
    """What all records of a call add, and what the first of them says that it cost: None where nobody knows.

    Invariant: what an upstream counted is final for an answer that came to its end; an estimate stands in place of what
    is not known, and no record says that an estimate is the cost."""

    expense: Expense
    cost: float | None


def bill_of(facts: AnswerFacts, request_bytes: int, prices: Prices | None, broken_bytes: Sequence[int]) -> Bill:
    """What a call bears whose request has so many bytes; `broken_bytes`: bytes of each answer that broke off before."""
    answer = facts.answer
    is_aborted = any((facts.finish or choice.finish or ABORT) == ABORT for choice in answer.choices)
    size = facts.read.size + facts.unread_bytes if facts.read and answer.choices else facts.size
    is_final = not (facts.is_streamed and is_aborted)
    usage = bill_usage(answer.usage, request_bytes, size, final=is_final)
    is_counted = is_final and usage == answer.usage
    total = expense_of(prices, usage)
    for part_bytes in broken_bytes:
        part = expense_of(prices, bill_usage((0, 0, 0), request_bytes, part_bytes))
        total = Expense(total.tokens + part.tokens, total.money + part.money)
    return Bill(total, cost(prices, usage) if is_counted else None)
