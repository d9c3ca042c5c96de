"""In front of an upstream that gives text and no token ids: what it says is captured and never trainable by RL.

Invariants: the request goes on byte for byte and the answer comes back byte for byte, refusals included; the caller's
key is never passed on; the assembled reply is in the capture log before the last byte leaves; a stream that breaks off
is recorded as aborted."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.responses import Response

from infra.errors import EngineError
from producers.engines.openai_upstream import UNTRAINABLE, StreamedReply, TextUpstream
from producers.gateway import keys
from producers.gateway.errors import of_engine
from producers.gateway.gateway import Gateway
from producers.gateway.lineage import ABORT
from producers.gateway.rendering.base import Message
from producers.gateway.session import Session, to_reply
from producers.gateway.wire import AnyChat, parse_any
from schemas.arrays import empty
from schemas.ids import new_id, now_micros


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


class Passthrough:
    """Chat calls of `gateway` answered by `upstream`."""

    def __init__(self, gateway: Gateway, upstream: TextUpstream) -> None:
        self.gateway = gateway
        self.upstream = upstream

    def prepare(self, headers: Mapping[str, str], body: bytes) -> Passed:
        """Whose call it is. Raises ApiError."""
        caller = self.gateway.identify(headers)
        asked = parse_any(body)
        messages = asked.plain()
        digests = keys.chain(messages, asked.tools)
        session = self.gateway.session_of(caller, headers, messages, digests)
        if session.step == 0:
            self.gateway.begin(session)
        return Passed(session, asked, body, messages, digests)

    async def chat(self, call: Passed) -> Response:
        """The upstream's whole answer."""
        with self.gateway.calling(call.session, call.name):
            try:
                answer = await self.upstream.chat(call.body)
            except EngineError as error:
                raise of_engine(error) from error
            if answer.status == 200:
                self._record(call, answer.body, orjson.loads(answer.body))
        await self.gateway.recorder.log.durable()
        return Response(answer.body, answer.status, dict(answer.headers))

    async def open(self, call: Passed) -> StreamedReply:
        """The upstream's answer to a streamed call, as soon as its status is known."""
        try:
            return await self.upstream.stream_chat(call.body)
        except EngineError as error:
            raise of_engine(error) from error

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
                    assembled.feed(part)
                    events, rest = _split(rest + part)
                    if events:
                        if held:
                            yield held
                        held = events
            done = True
            self._record(call, orjson.dumps(assembled.response()), assembled.response())
            await self.gateway.recorder.log.durable()
            yield held + rest
        except EngineError as error:
            done = True
            self._abort(call, assembled)
            yield b"data: " + of_engine(error).body() + b"\n\n"
        finally:
            if not done:
                self._abort(call, assembled)

    def _abort(self, call: Passed, assembled: Assembled) -> None:
        assembled.finish = ABORT
        self._record(call, orjson.dumps(assembled.response()), assembled.response())

    def _record(self, call: Passed, response: bytes, content: Mapping[str, Any]) -> None:
        session, asked, usage = call.session, call.asked, content.get("usage") or {}
        now = time.perf_counter()
        for choice in content.get("choices") or ():
            message = choice.get("message") or {}
            body = {
                "call_id": new_id(),
                "response_id": str(content.get("id") or new_id()),
                "choice": choice.get("index", 0),
                "lineage": new_id(),
                "opened": UNTRAINABLE,
                "supersedes": None,
                "turn": session.lineages.turns,
                "prefix_len": 0,
                "prompt_ids": empty("int32"),
                "output_ids": empty("int32"),
                "output_logprobs": empty("float32"),
                "output_versions": empty("int32"),
                "request": call.body,
                "response": response,
                "sampling": _sampling(asked),
                "finish_reason": choice.get("finish_reason") or ABORT,
                "stop_condition": None,
                "engine": "openai",
                "engine_version": self.upstream.base_url,
                "engine_incarnation": "",
                "tokenizer_hash": "",
                "template_hash": "",
                "usage": {
                    "prompt": usage.get("prompt_tokens") or 0,
                    "completion": usage.get("completion_tokens") or 0,
                    "cached": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
                },
                "cost": None,
                "latency_us": int((now - call.began) * 1e6),
                "ttft_us": int(((call.first or now) - call.began) * 1e6),
                "trainable": False,
                "untrainable_reason": UNTRAINABLE,
            }
            self.gateway.recorder.record(session, "model_call", body, actor="policy", event_time=call.when)
            session.said = message.get("content") or session.said
            self.gateway.sessions.replied(session, keys.extend(call.digests[-1], to_reply(message)))
        session.lineages.turns += 1
        session.touch()


class Assembled:
    """A streamed answer put together again."""

    def __init__(self) -> None:
        self.finish: str | None = None
        self._rest = b""
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._finish: dict[int, str] = {}

    def feed(self, part: bytes) -> None:
        """More bytes of the event stream."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data.startswith(b"{"):
                self._take(orjson.loads(data))

    def _take(self, event: Mapping[str, Any]) -> None:
        self._head |= {name: event[name] for name in ("id", "created", "model", "usage") if event.get(name)}
        for choice in event.get("choices") or ():
            message = self._choices.setdefault(choice.get("index", 0), {"role": "assistant", "content": ""})
            delta = choice.get("delta") or {}
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls") or ():
                _add_call(message.setdefault("tool_calls", []), call)
            if choice.get("finish_reason"):
                self._finish[choice.get("index", 0)] = choice["finish_reason"]

    def response(self) -> dict[str, Any]:
        """The whole response that the stream amounts to."""
        choices = [
            {"index": index, "message": message, "finish_reason": self.finish or self._finish.get(index)}
            for index, message in sorted(self._choices.items())
        ]
        return {**self._head, "object": "chat.completion", "choices": choices}


def _split(data: bytes) -> tuple[bytes, bytes]:
    """(whole events, the beginning of the next)."""
    at = max((data.rfind(end) + len(end) for end in (b"\n\n", b"\r\n\r\n") if end in data), default=0)
    return data[:at], data[at:]


def _add_call(calls: list[dict[str, Any]], delta: Mapping[str, Any]) -> None:
    at = delta.get("index", 0)
    while len(calls) <= at:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[at], delta.get("function") or {}
    call["id"] = delta.get("id") or call["id"]
    call["function"]["name"] = function.get("name") or call["function"]["name"]
    call["function"]["arguments"] += function.get("arguments") or ""


def _sampling(asked: AnyChat) -> dict[str, Any]:
    limit = asked.max_completion_tokens or asked.max_tokens
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop
    return {
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "top_k": 0,
        "max_tokens": limit or 0,
        "seed": asked.seed,
        "stop": stop or [],
        "n": asked.n or 1,
    }
