"""Chat completions, as OpenAI's clients write and parse them: `n`, log-probabilities, tool calls whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import orjson

from millrace.dialects import shape
from millrace.dialects.answers import WholeAnswer, answer_in, listed, mapping, numbers
from millrace.dialects.base import Dialect, ReplyStream, StreamEvent
from millrace.dialects.chat.request import ask_of, parse_any, parse_chat
from millrace.dialects.common import DONE, usage_of
from millrace.dialects.conversation import Ask, Part, Text, Thinking, ToolUse, ToolUsePiece
from millrace.dialects.errors import ApiError
from millrace.dialects.reading.chat_assembler import AssembledStream
from millrace.dialects.reading.events import ReplyEvents
from millrace.dialects.reading.reader import DialectReader, RecordedCall
from millrace.dialects.writable import WritableCall, WritableChoice
from millrace.infra.process.offload import SLICE
from millrace.schemas import bounds
from millrace.schemas.json_values import Json, JsonObject


class ChatReader(DialectReader):
    """Chat completions of an upstream, in the shapes that servers give them."""

    def answer_in(self, response: Mapping[str, Json]) -> WholeAnswer:
        return answer_in(response)

    def lighter(self, body: bytes) -> bytes:
        """Without log-probabilities, which are most of an answer's values where they were asked for."""
        if shape.measure(body).depth > bounds.DEPTH:
            return body
        try:
            members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            choices = msgspec.json.decode(members.get("choices", b"[]"), type=list[dict[str, msgspec.Raw]])
        except msgspec.DecodeError:
            return body
        for choice in choices:
            choice.pop("logprobs", None)
        return msgspec.json.encode({**members, "choices": choices})

    def assembler(self) -> ReplyEvents:
        return AssembledStream()


class Chat(Dialect):
    """`POST /v1/chat/completions`."""

    name = "chat"
    path = "/v1/chat/completions"
    prefix = "chatcmpl-"
    reader = ChatReader

    def parse(self, body: bytes) -> Ask:
        return ask_of(parse_chat(body))

    def whole(self, call: WritableCall, choices: Sequence[WritableChoice]) -> bytes:
        entries = [
            {
                "index": choice.index,
                "message": choice.message(),
                "logprobs": _all_logprobs(call, choice),
                "finish_reason": choice.reason,
            }
            for choice in choices
        ]
        return orjson.dumps({**_head(call, "chat.completion"), "choices": entries, "usage": usage_of(call)})

    def stream_writer(self, call: WritableCall) -> ReplyStream:
        return ChatStream(call)

    def events_of(self, response: Mapping[str, Json]) -> list[StreamEvent]:
        head = {name: value for name, value in response.items() if name not in ("choices", "usage")}
        starts, ends = list[JsonObject](), list[JsonObject]()
        choices = [choice for choice in listed(response.get("choices")) if isinstance(choice, dict)][: bounds.CHOICES]
        for index, choice in zip(numbers(choices), choices, strict=True):
            choice = {**choice, "index": index}
            delta = dict(mapping(choice.pop("message", None)))
            if calls := listed(delta.get("tool_calls")):
                delta["tool_calls"] = [{"index": place, **mapping(call)} for place, call in enumerate(calls)]
            starts.append({**choice, "delta": delta, "finish_reason": None})
            ends.append({"index": index, "delta": {}, "finish_reason": choice.get("finish_reason")})
        chunks: list[JsonObject] = [{"choices": starts}, {"choices": ends, "usage": response.get("usage")}]
        events = [StreamEvent("", orjson.dumps({**head, "object": "chat.completion.chunk", **one})) for one in chunks]
        return [*events, DONE] if starts else []

    def error(self, error: ApiError) -> bytes:
        return error.body()

    def wrote(self, response: Mapping[str, Json]) -> bool:
        return True  # what nobody else wrote: upstreams write it in shapes of their own

    def read(self, request: bytes, response: Mapping[str, Json]) -> RecordedCall:
        parsed_request = parse_any(request)
        replies = {answer.choice: answer.message for answer in answer_in(response).choices}
        return RecordedCall(parsed_request.plain(), parsed_request.tools, replies)


class ChatStream(ReplyStream):
    """Chunks. The role stands before anything else of a choice."""

    def __init__(self, call: WritableCall) -> None:
        self._call = call
        self._made: dict[int, int] = {}
        """tool calls by choice; a choice that has begun is in it"""
        self._open: dict[int, tuple[str, int]] = {}
        """by choice: the id of its last call, and how much of its arguments is said"""
        self._head = orjson.dumps({**_head(call, "chat.completion.chunk"), "choices": []})[:-2]
        """of every chunk, up to what its choices hold"""
        self._words: dict[int, bytes] = {}
        """by choice: `_head`, and what of the choice is before its words"""

    def take(self, choice: WritableChoice, parts: Sequence[Part], tokens: int) -> list[StreamEvent]:
        out: list[StreamEvent] = []
        if choice.index not in self._made:
            self._made[choice.index] = 0
            out.append(self._event(choice, {"role": "assistant", "content": ""}))
        logprobs: JsonObject | None = None
        if tokens and self._call.request.logprobs:
            end = len(choice.ids)
            logprobs = _logprobs(self._call, choice, end - tokens, end)
        for part in parts:
            if logprobs is None and type(part) is Text:  # as nearly all are: as `_event` writes it
                out.append(StreamEvent("", self._word(choice.index, part.text)))
                continue
            content: JsonObject | None
            match part:
                case ToolUsePiece() | ToolUse():
                    if (content := self._call_delta(choice, part)) is None:
                        continue
                case Thinking():
                    content = {"reasoning_content": part.text}
                case Text():
                    content = {"content": part.text}
                case _:
                    continue  # nothing else is sampled
            out.append(self._event(choice, content, logprobs=logprobs))
            logprobs = None
        if logprobs is not None:
            out.append(self._event(choice, {}, logprobs=logprobs))
        return out

    def _word(self, index: int, text: str) -> bytes:
        """A chunk that holds nothing but words of a choice."""
        if (head := self._words.get(index)) is None:
            head = self._words[index] = self._head + b'{"index":%d,"delta":{"content":' % index
        return b'%b%b},"logprobs":null,"finish_reason":null}]}' % (head, orjson.dumps(text))

    def _call_delta(self, choice: WritableChoice, part: ToolUse | ToolUsePiece) -> JsonObject | None:
        """What a part adds to the calls of a choice, None where all of it is said."""
        id, size = self._open.get(choice.index, ("", 0))
        goes_on = id == part.id
        if not goes_on:
            self._made[choice.index] += 1
            size = 0
        piece = part.arguments[size:] if isinstance(part, ToolUse) else part.arguments
        self._open[choice.index] = (part.id, size + len(piece))
        function = {"arguments": piece} if goes_on else {"name": part.name, "arguments": piece}
        head = {} if goes_on else {"id": part.id, "type": "function"}
        if goes_on and not piece:
            return None
        return {"tool_calls": [{"index": self._made[choice.index] - 1, **head, "function": function}]}

    def end(self) -> list[StreamEvent]:
        call = self._call
        out = [self._event(choice, {}, finish=choice.reason) for choice in call.choices]
        options = call.request.given.stream_options
        if options is not None and options.include_usage:
            body = {**_head(call, "chat.completion.chunk"), "choices": [], "usage": usage_of(call)}
            out.append(StreamEvent("", orjson.dumps(body)))
        return [*out, DONE]

    def _event(
        self, choice: WritableChoice, delta: JsonObject, *, finish: str | None = None, logprobs: object = None
    ) -> StreamEvent:
        part = {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return StreamEvent("", self._head + orjson.dumps(part) + b"]}")


def _head(call: WritableCall, kind: str) -> JsonObject:
    """What every response and every chunk begins with."""
    return {
        "id": call.response_id,
        "object": kind,
        "created": call.when // 1_000_000,
        "model": call.request.model,
        "system_fingerprint": None,
    }


def _all_logprobs(call: WritableCall, choice: WritableChoice) -> JsonObject | None:
    """`logprobs` of the whole choice, encoded piece by piece, so that others have the interpreter in between."""
    if not call.request.logprobs:
        return None
    parts = []
    for start in range(0, len(choice.ids), SLICE):
        piece = _logprobs(call, choice, start, min(start + SLICE, len(choice.ids)))
        parts.append(orjson.dumps(piece and piece["content"])[1:-1])
    return {"content": orjson.Fragment(b"[" + b",".join(parts) + b"]")}


def _logprobs(call: WritableCall, choice: WritableChoice, start: int, end: int) -> JsonObject | None:
    """OpenAI's log-probabilities of tokens [start, end), None where the client did not ask."""
    if not call.request.logprobs:
        return None
    tops = choice.tops[start:end] if choice.tops else [()] * (end - start)
    content = [
        {**_token(call, id, logprob), "top_logprobs": [_token(call, *rival) for rival in rivals]}
        for id, logprob, rivals in zip(choice.ids[start:end], choice.logprobs[start:end], tops, strict=False)
    ]
    return {"content": content}


def _token(call: WritableCall, id: int, logprob: float) -> JsonObject:
    return {"token": call.token(id), "logprob": max(logprob, -9999.0), "bytes": list(call.token_bytes(id))}
