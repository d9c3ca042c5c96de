"""In front of an upstream that gives text and no token ids: what it says is captured and never trainable by RL.

Invariants: the request goes on byte for byte and the answer comes back byte for byte, refusals included; the caller's
key is never passed on; the assembled reply is in the capture log before the last byte leaves; a stream that breaks off,
or whose client left, is recorded as aborted; an answer that cannot be read leaves a gap in the log and reaches the
client all the same."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import orjson
from starlette.responses import Response

from millrace.infra.engines.upstream import UNTRAINABLE, StreamedReply, TextUpstream
from millrace.infra.errors import EngineError
from millrace.producers.gateway import keys
from millrace.producers.gateway.answers import Said, WholeAnswer, number, read_answer, understood
from millrace.producers.gateway.aside import Step, aside, by_turns
from millrace.producers.gateway.assembled import LARGEST, Assembled
from millrace.producers.gateway.errors import ApiError, of_engine
from millrace.producers.gateway.gateway import Caller, Gateway
from millrace.producers.gateway.lineage import ABORT
from millrace.producers.gateway.protocols.chat_request import AnyChat, parse_any
from millrace.producers.gateway.recorder import LARGE
from millrace.producers.gateway.rendering.base import Message
from millrace.producers.gateway.session import Session
from millrace.producers.gateway.whose import hints
from millrace.schemas import bounds
from millrace.schemas.arrays import empty
from millrace.schemas.ids import new_id, now_micros
from millrace.schemas.records import ModelCall, Sampling

logger = logging.getLogger(__name__)

PIECE = 8 << 10
"""bytes of a stream that are read in one go"""
TOGETHER = 16 << 20
"""bytes that the records of one answer's choices may have, each of which holds the request and the whole answer"""
LONGEST_EVENT = 1 << 20
"""bytes of a streamed event that are held back until its end comes"""


@dataclass(slots=True)
class Passed:
    """One call on its way."""

    session: Session
    asked: AnyChat
    body: bytes
    messages: list[Message]
    digests: list[bytes]
    name: str = field(default_factory=new_id)
    began: float = field(default_factory=time.perf_counter)
    when: int = field(default_factory=now_micros)
    first: float | None = None


class Read:
    """What an answer says, and the digest of the conversation with each of its choices, from `before`, that of
    the request."""

    def __init__(self, answer: WholeAnswer, before: bytes) -> None:
        self.answer = answer
        self.digests = [keys.extend(before, said.message) for said in answer.choices]


class Passthrough:
    """Chat calls of `gateway` answered by `upstream`."""

    def __init__(self, gateway: Gateway, upstream: TextUpstream) -> None:
        self.gateway = gateway
        self.upstream = upstream

    async def prepare(self, caller: Caller, headers: Mapping[str, str], body: bytes) -> Passed:
        """Whose call it is. Raises ApiError."""
        asked, messages, digests = await aside(len(body), _understood, body)
        said = hints(headers, asked.user, asked.safety_identifier)
        session, _ = self.gateway.called(caller, said, messages, digests)
        return Passed(session, asked, body, messages, digests)

    async def chat(self, call: Passed) -> Response:
        """The upstream's whole answer."""
        answered = False
        try:
            with self.gateway.calling(call.session, call.name):
                answer = await self.upstream.chat(call.body)
                read = await aside(len(answer.body), _readable, answer.body, call.digests[-1])
            answered = answer.status == 200
        except EngineError as error:
            raise self._failed(call, error) from error
        except asyncio.CancelledError:
            self._abort(call, Assembled())
            raise
        finally:
            if not answered:
                self.gateway.unbegun(call.session)
        if answered:
            with self.gateway.calling(call.session, call.name):
                await self._record(call, answer.body, read)
        await self.gateway.recorder.durable(call.session)
        return Response(answer.body, answer.status, dict(answer.headers))

    async def open(self, call: Passed) -> StreamedReply:
        """The upstream's answer to a streamed call, as soon as its status is known."""
        opened = False
        try:
            with self.gateway.calling(call.session, call.name):
                answer = await self.upstream.stream_chat(call.body)
            opened = answer.status == 200
        except EngineError as error:
            raise self._failed(call, error) from error
        except asyncio.CancelledError:
            self._abort(call, Assembled())
            raise
        finally:
            if not opened:
                self.gateway.unbegun(call.session)
        return answer

    def _failed(self, call: Passed, error: EngineError) -> ApiError:
        logger.warning("a call of %s failed: %s", call.session.id, error)
        return of_engine(error)

    async def stream(self, call: Passed, answer: StreamedReply) -> AsyncGenerator[bytes, None]:
        """The bytes as they come; the last of them after the call is recorded."""
        with self.gateway.calling(call.session, call.name):
            async with aclosing(self._stream(call, answer)) as parts:
                async for part in parts:
                    yield part

    async def _stream(self, call: Passed, answer: StreamedReply) -> AsyncGenerator[bytes, None]:
        # Whole events only, so that an error event can follow any of them; the newest wait until more comes.
        assembled, held, rest, done = Assembled(), b"", b"", False
        try:
            async with answer:
                async for part in answer.chunks():
                    call.first = call.first or time.perf_counter()
                    for at in range(0, len(part), PIECE):
                        assembled.feed(part[at : at + PIECE])
                        if len(part) > PIECE:
                            await asyncio.sleep(0)  # others have their turn
                    events, rest = _split(rest + part)
                    if len(rest) > LONGEST_EVENT:
                        events, rest = events + rest, b""
                    if events:
                        if held:
                            yield held
                        held = events
            response, read = await aside(assembled.size, _whole, assembled, call.digests[-1])
            done = True
            await self._record(call, response, read, assembled.unread)
            await self.gateway.recorder.durable(call.session)
            yield held + rest
        except EngineError as error:
            done = True
            self._abort(call, assembled)
            yield b"data: " + self._failed(call, error).body() + b"\n\n"
        finally:
            if not done:
                self._abort(call, assembled)

    def _abort(self, call: Passed, assembled: Assembled) -> None:
        assembled.finish = ABORT
        found = assembled.response()
        if not found["choices"]:
            found["choices"] = [{"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": ABORT}]
        read = Read(understood(found), call.digests[-1])
        for _ in self._records(call, orjson.dumps(found), read, assembled.unread):
            pass

    async def _record(self, call: Passed, response: bytes, read: Read | None, unread: int = 0) -> None:
        """Every choice of an answer into the log, between which others have their turn; a gap for one that cannot be
        read. Never raises; cancelling it leaves nothing unrecorded."""
        await by_turns(self._records(call, response, read, unread))

    def _records(self, call: Passed, response: bytes, read: Read | None, unread: int) -> Iterator[Step]:
        session, recorder = call.session, self.gateway.recorder
        self.gateway.begun(session)
        if read is None or not read.answer.choices:
            logger.warning("an answer of the upstream to %s is no chat completion: %d bytes", session.id, len(response))
            recorder.missed(session, "model_call", "the upstream's answer is no chat completion")
            return
        turn, session.lineages.turns = session.lineages.turns, session.lineages.turns + 1
        size = len(call.body) + len(response)
        room = max(1, TOGETHER // size)
        for at, (said, digest) in enumerate(zip(read.answer.choices[:room], read.digests, strict=False)):
            body, draft = self._body(call, response, read.answer, said, turn), None
            if size >= LARGE:
                draft = recorder.draft(session, "model_call", body, actor="policy")
                yield draft.write
            elif at:
                yield None
            recorder.record(session, "model_call", body, actor="policy", event_time=call.when, draft=draft)
            session.asks.called(call.messages, call.when)
            session.asks.replied(read.answer.id, said.message, now_micros())
            if not at:
                self.gateway.followed_up(session, call.messages, call.digests)
            self.gateway.sessions.answered(session, read.answer.id, digest)
            session.said = said.message["content"] or session.said
            self.gateway.sessions.replied(session, digest)
        if unread:
            reason = f"{unread} parts of the upstream's stream could not be read"
            recorder.missed(session, "model_call", reason)
        if len(read.answer.choices) > room:
            reason = f"{len(read.answer.choices) - room} of the upstream's choices are more than a record holds"
            recorder.missed(session, "model_call", reason)
        session.touch()

    def _body(self, call: Passed, response: bytes, answer: WholeAnswer, said: Said, turn: int) -> ModelCall:
        now = time.perf_counter()
        prompt, completion, cached = answer.usage
        return {
            "call_id": new_id(),
            "response_id": answer.id,
            "choice": said.choice,
            "lineage": new_id(),
            "opened": UNTRAINABLE,
            "supersedes": None,
            "turn": turn,
            "prefix_len": 0,
            "prompt_ids": empty("int32"),
            "output_ids": empty("int32"),
            "output_logprobs": empty("float32"),
            "output_versions": empty("int32"),
            "request": call.body,
            "response": response,
            "sampling": _sampling(call.asked),
            "finish_reason": said.finish or ABORT,
            "stop_condition": None,
            "engine": "openai",
            "engine_version": self.upstream.base_url,
            "engine_incarnation": "",
            "tokenizer_hash": "",
            "template_hash": "",
            "usage": {"prompt": prompt, "completion": completion, "cached": cached},
            "cost": None,
            "latency_us": int((now - call.began) * 1e6),
            "ttft_us": int(((call.first or now) - call.began) * 1e6),
            "trainable": False,
            "untrainable_reason": UNTRAINABLE,
        }


def _understood(body: bytes) -> tuple[AnyChat, list[Message], list[bytes]]:
    asked = parse_any(body)
    messages = asked.plain()
    return asked, messages, keys.chain(messages, asked.tools)


def _readable(body: bytes, before: bytes) -> Read | None:
    if len(body) > LARGEST:
        return None
    try:
        return Read(read_answer(body), before)
    except ValueError:
        return None


def _whole(assembled: Assembled, before: bytes) -> tuple[bytes, Read]:
    found = assembled.response()
    return orjson.dumps(found), Read(understood(found), before)


def _split(data: bytes) -> tuple[bytes, bytes]:
    """(whole events, the beginning of the next)."""
    at = max((data.rfind(end) + len(end) for end in (b"\n\n", b"\r\n\r\n") if end in data), default=0)
    return data[:at], data[at:]


def _sampling(asked: AnyChat) -> Sampling:
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop
    return {
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "top_k": 0,
        "max_tokens": number(asked.max_completion_tokens or asked.max_tokens),
        "seed": asked.seed if asked.seed is not None and abs(asked.seed) <= bounds.INT else None,
        "stop": stop if stop and len(stop) <= bounds.NAMES else [],
        "n": number(asked.n, 1) or 1,
    }
