"""A call that an engine of ours answers: what its choices amount to, and what the log gets to know of them. What the
client gets is its dialect's to write.

Invariants: a call that fails before its first token leaves no trace in its session; a granted session's call is
trainable only if every token has a known version at or above the grant's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from millrace.dialects import match_keys
from millrace.dialects.base import ReplyStream
from millrace.dialects.conversation import Ask, Part
from millrace.dialects.errors import RETRY_AFTER_S, ApiError, of_engine
from millrace.dialects.rendering.base import Message, Parser, Tools
from millrace.infra import telemetry
from millrace.infra.engines.base import ABORT, Chunk, Sampling, Usage, token_versions
from millrace.infra.errors import EngineError
from millrace.infra.process.offload import SLICE, run_aside
from millrace.producers.gateway.calls.call import AnsweredBy, Call, TokenTrace, WholeReply, model_call
from millrace.producers.gateway.calls.choice import Choice, bar_of, breach_of, slices
from millrace.producers.gateway.calls.fleet import EngineTarget
from millrace.producers.gateway.calls.relay import Relay
from millrace.producers.gateway.calls.routing import RouteWish
from millrace.producers.gateway.calls.sampling import record_of
from millrace.producers.gateway.calls.served_policy import ServedPolicy
from millrace.producers.gateway.sessions.lineage import CallStart
from millrace.producers.gateway.sessions.reply_index import ChoiceReply
from millrace.producers.gateway.sessions.session import to_reply
from millrace.producers.gateway.spending import Expense, expense_of
from millrace.schemas.arrays import pack
from millrace.schemas.ids import new_id
from millrace.schemas.labels import make_label
from millrace.schemas.records import EngineShare, ModelCall

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 2**17
"""numbers beyond which even a plain reply comes from the engine piece by piece"""

_calls = telemetry.counter("millrace.gateway.calls", "{call}", "calls served, by finish reason")
_tokens = telemetry.counter("millrace.gateway.tokens", "{token}", "tokens sampled")


@dataclass(slots=True, eq=False, kw_only=True)
class EngineCall(Call):
    """One request being served."""

    request: Ask
    plan: CallStart
    sampling: Sampling
    served_policy: ServedPolicy
    target: EngineTarget
    wish: RouteWish
    call_id: str = field(default_factory=new_id)
    usage: Usage | None = None
    has_strayed: bool = False
    """whether another did"""
    process: int = 0
    """the index of the process that serves it, among those of its gateway"""
    choices: list[Choice] = field(default_factory=list)
    _start: str = ""
    """which start of the present engine it began at"""
    _shares: list[EngineShare] = field(default_factory=list)
    """of engines that failed behind tokens, whose versions they had not told"""
    _turn_tokens: int = 0
    """tokens that were handled since others had their turn"""
    _writer: ReplyStream | None = None
    _events: list[bytes] = field(default_factory=list)
    """what the client has not got yet"""
    _responses: list[bytes] = field(default_factory=list)
    """of a reply that came to its end: what the record of each choice says that the client got"""

    def __post_init__(self) -> None:
        self._start = self.target.incarnation
        tools = None if self.request.choice == "none" else self.request.tools
        stop = self.sampling.stop
        self.choices = [
            Choice(index, self._parser(tools, stop), process=self.process) for index in range(self.sampling.n)
        ]

    def _parser(self, tools: Tools, stop: Sequence[str]) -> Parser:
        if self.request.prompt is not None:
            return self.served_policy.renderer.plain_parser(stop)
        return self.served_policy.renderer.parser(self.plan.prompt, tools, stop)

    @property
    def response_id(self) -> str:
        """The id of its response."""
        return self.name

    @property
    def streams(self) -> bool:
        return self.request.stream

    @property
    def policy(self) -> str:
        return self.served_policy.policy

    @property
    def is_answered(self) -> bool:
        return self.first is not None

    @property
    def messages(self) -> Sequence[Message]:
        return self.plan.messages

    @property
    def digests(self) -> Sequence[bytes]:
        return self.plan.digests

    @property
    def replaces(self) -> str | None:
        return self.plan.supersedes

    @property
    def is_bounded(self) -> bool:
        """Whether a grant bounds its versions: a grant speaks of the versions of its own policy."""
        return self.session.has_grant and self.session.policy == self.policy

    @property
    def is_finished(self) -> bool:
        """Whether every choice has come to its end."""
        return all(choice.finish is not None for choice in self.choices)

    # ------------------------------------------------------------------ its answer

    async def answer(self) -> WholeReply:
        # What may be very long is asked for piece by piece: read at once it would keep everybody else waiting.
        numbers = self.sampling.n * self.sampling.max_tokens * (1 + self.sampling.top_logprobs)
        streams = numbers > MOST_AT_ONCE
        async with self._chunks(stream=streams) as chunks:
            async for chunk in chunks:
                for piece in slices(chunk) if streams else (chunk,):
                    await run_aside(0 if streams else 8 * len(piece.token_ids), self._take, piece)
                    if self._has_handled(len(piece.token_ids)):
                        await asyncio.sleep(0)
        self._check_version()
        response, self._responses = await run_aside(self._response_bytes, self.dialect.responses, self)
        return WholeReply(response)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        self._writer = writer = self.dialect.stream_writer(self)
        async with self._chunks(stream=True) as chunks:
            async for chunk in chunks:
                for piece in slices(chunk):
                    choice, parts = self._take(piece)
                    new_events = writer.take(choice, parts, len(piece.token_ids))
                    self._events += [event.sse() for event in new_events]
                    # The last tokens leave with the end of the response.
                    if self._events and (choice.finish is None or not self.is_finished):
                        events = self._events[0] if len(self._events) == 1 else b"".join(self._events)
                        self._events = []
                        yield events
                    if self._has_handled(len(piece.token_ids)):
                        await asyncio.sleep(0)

    async def close(self) -> None:
        try:
            self._check_version()
        except ApiError:
            self._events.clear()  # no end of a reply that is none
            raise
        _, self._responses = await run_aside(self._response_bytes, self.dialect.responses, self)

    def rest(self) -> bytes:
        return b"".join(self._events)

    def end(self) -> bytes:
        assert self._writer is not None
        return b"".join([*self._events, *(event.sse() for event in self._writer.end())])

    def let_go(self) -> None:
        self._writer = None  # which knows this call

    def break_off(self, *, is_unread: bool) -> None:
        if is_unread:
            for choice in self.choices:
                choice.finish = ABORT

    def check(self) -> None:
        if any(choice.reason == ABORT for choice in self.choices):
            raise ApiError(503, "The engine aborted this reply: try again", type="server_error", code="engine_aborted")

    @asynccontextmanager
    async def _chunks(self, *, stream: bool) -> AsyncGenerator[AsyncGenerator[Chunk, None], None]:
        """The engine's chunks. A failure before the first leaves no trace. Raises ApiError."""
        relay = Relay(
            self.served_policy.fleet, self.target, self.wish, self.plan.prompt, self.sampling, self.call_id, self._move
        )
        try:
            async with aclosing(relay.chunks(stream=stream)) as chunks:
                yield chunks
        except EngineError as error:
            logger.warning("%s of %s: %s", self.name, self.session.id, error)
            raise of_engine(error) from error
        finally:
            if self.first is None:
                self.session.lineages_of(self.policy).withdraw(self.plan)

    def _move(self, target: EngineTarget) -> None:
        """Another engine goes on with it, which has no part in what the first one leaves without labels."""
        if count := self.completion_tokens - sum(share["tokens"] for share in self._shares):
            kind, address = self.target.engine.kind, self.target.url
            self._shares.append(
                {"engine": kind, "engine_version": address, "engine_incarnation": self._start, "tokens": count}
            )
        self.target, self._start = target, target.incarnation
        self.session.engines[self.policy] = target.url

    def _take(self, chunk: Chunk) -> tuple[Choice, list[Part]]:
        """A chunk of the engine: the choice it belongs to, and what can be said of it. Raises ApiError for what no
        engine should send."""
        try:
            if self.first is None:
                self.first = time.perf_counter()
            if chunk.usage is not None:
                self.usage = chunk.usage
            choice = self.choices[chunk.index]
            return choice, choice.feed(chunk)
        except Exception as error:
            logger.exception("%s: what %s sent cannot be read", self.name, self.target.url)
            raise ApiError(
                502, "The engine's reply cannot be read: try again", type="server_error", code="engine_unreadable"
            ) from error

    def _has_handled(self, tokens: int) -> bool:
        """So many more tokens were handled: whether others are to have their turn."""
        self._turn_tokens += tokens * (1 + self.sampling.top_logprobs)
        if self._turn_tokens < SLICE:
            return False
        self._turn_tokens = 0
        return True

    def _check_version(self) -> None:
        """The end of a reply: one that another version than the named sampled, whole or in part, is given up. Raises
        ApiError 503; an engine that is still said to serve the version is doubted."""
        version = self.wish.version
        if version is None:
            return
        for choice in self.choices:
            if (token_versions(choice.spans, len(choice.ids), self.policy) != version).any():
                self.has_strayed = True
        if not self.has_strayed:
            return
        self.break_off(is_unread=True)
        logger.warning("%s of %s: another version from %s", self.name, self.session.id, self.target.url)
        if self.target.version == version:
            self.distrust()
        label = make_label(self.policy, version)
        raise ApiError(
            503,
            f"The weights changed during this reply, which is not {label}'s: try again",
            type="server_error",
            code="version_changed",
            retry_after_s=RETRY_AFTER_S,
        )

    @property
    def _response_bytes(self) -> int:
        """Roughly how many bytes its response has."""
        return sum(len(choice.ids) for choice in self.choices) * (100 if self.request.logprobs else 8)

    @property
    def cached(self) -> int:
        """Tokens of the prompt that the engine had read before, as far as it says."""
        return self.usage.cached if self.usage else 0

    # ------------------------------------------------------------------ what its dialect writes, see `WritableCall`

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.plan.prompt)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all replies so far."""
        return sum(len(choice.ids) for choice in self.choices)

    @property
    def temperature(self) -> float:
        """At which it is sampled."""
        return self.sampling.temperature

    @property
    def top_p(self) -> float:
        """With which it is sampled."""
        return self.sampling.top_p

    @property
    def is_shortened(self) -> bool:
        """Whether replies may have fewer tokens than were asked for, since the context has no room for more."""
        asked_tokens = self.request.max_tokens
        return asked_tokens is not None and self.sampling.max_tokens < asked_tokens

    @property
    def keeps(self) -> bool:
        """Whether later requests may name its response."""
        return True

    def token(self, id: int) -> str:
        """The text of a token."""
        return self.served_policy.renderer.text(id)

    def token_bytes(self, id: int) -> bytes:
        """The bytes of a token."""
        return self.served_policy.renderer.token_bytes(id)

    # ------------------------------------------------------------------ in the log

    def unreadable(self) -> str | None:
        return None

    @property
    def count(self) -> int:
        return len(self.choices)

    def spending(self, at: int) -> dict[str, str]:
        return self._expense_of(self.choices[at]).note(self.payer)

    def _expense_of(self, choice: Choice) -> Expense:
        """What the record of one choice adds; the first bears the prompt."""
        prompt, cached_tokens = (len(self.plan.prompt), self.cached) if choice.index == 0 else (0, 0)
        return expense_of(self.served_policy.prices, (prompt, len(choice.ids), cached_tokens))

    def reply(self, at: int) -> ChoiceReply:
        choice = self.choices[at]
        message = to_reply(choice.message())
        return ChoiceReply(
            self.name,
            choice.index,
            message,
            match_keys.extend(self.plan.digests[-1], message),
            self._responses[at] if self._responses else self.dialect.record(self, choice),
            choice.reason,
            None if choice.reason == ABORT else self.request.stored,
            has_our_ids=True,
        )

    def record(self, at: int, reply: ChoiceReply) -> tuple[ModelCall, str | None]:
        choice, renderer = self.choices[at], self.served_policy.renderer
        placement = self.session.lineages_of(self.policy).placement(self.plan, choice.index, self.sampling.n)
        versions = token_versions(choice.spans, len(choice.ids), self.policy)
        breach = breach_of(versions, self.session.start["min_version"]) if self.is_bounded else None
        return model_call(
            self,
            reply,
            AnsweredBy(
                self.target.engine.kind,
                self.target.url,
                self.target.incarnation,
                renderer.tokenizer_hash,
                renderer.template_hash,
            ),
            call_id=self.call_id,
            turn=self.plan.turn,
            trace=TokenTrace(
                placement["lineage"],
                placement["opened"],
                placement["prefix_len"],
                {"dtype": "int32", "data": placement["prompt"]},
                pack(choice.ids, "int32"),
                pack(choice.logprobs, "float32"),
                pack(versions, "int32"),
            ),
            sampling=record_of(self.sampling),
            usage=(len(self.plan.prompt), len(choice.ids), self.cached),
            cost=None if self.served_policy.prices is None else self._expense_of(choice).money,
            stop=None if choice.stop is None else str(choice.stop),
            bar="other_version" if self.has_strayed else bar_of(choice, self.sampling) or breach,
            earlier_engines=self._shares,
        ), breach

    def size(self, reply: ChoiceReply) -> int:
        return len(self.body) + len(reply.response) + len(self.plan.prompt_bytes)

    def fold(self, body: ModelCall, reply: ChoiceReply) -> None:
        plan = self.plan
        self.session.lineages_of(self.policy).apply(
            body, plan.messages, plan.digests, plan.hash, reply.message, plan.options
        )

    def forget(self) -> None:
        self.session.forget()

    def distrust(self) -> None:
        if not self._shares:
            self.served_policy.fleet.doubt(self.target)

    def note(self, choice: ChoiceReply, at: int) -> None:
        _calls.add(1, finish=choice.finish)
        _tokens.add(len(self.choices[at].ids))
