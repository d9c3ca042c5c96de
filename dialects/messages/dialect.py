"""Anthropic's Messages: one reply of typed blocks, streamed as named events, tokens counted beforehand.

Invariants: a block is written whole before the next begins, and streamed blocks amount to the reply; thoughts are shown
to a client that asks for them, and recorded in any case; the input of a tool is the model's own text of it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import orjson

from millrace.dialects import shape
from millrace.dialects.answers import listed, mapping, text
from millrace.dialects.base import Dialect, ReplyStream, SideRequest, SideRoute, StreamEvent
from millrace.dialects.conversation import Ask, Part, Text, Thinking, ToolUse, ToolUsePiece, Turn, messages_of
from millrace.dialects.errors import ApiError
from millrace.dialects.messages.reader import PIECES, MessagesReader
from millrace.dialects.messages.request import (
    NO_THREADS,
    MessagesRequest,
    arguments_of,
    ask_of,
    parse_any,
    parse_count,
    parse_messages,
    session_of,
    tools_of,
    turns_of,
)
from millrace.dialects.messages.threads import previous_message, to_store
from millrace.dialects.reading.head import RequestHead
from millrace.dialects.reading.reader import RecordedCall
from millrace.dialects.writable import WritableCall, WritableChoice
from millrace.schemas.json_values import Json, JsonObject

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""names of errors by status"""


class Messages(Dialect):
    """`POST /v1/messages`."""

    name = "messages"
    path = "/v1/messages"
    names_in = "metadata.user_id"
    prefix = "msg_"
    reader = MessagesReader
    unknown = "{}: Extra inputs are not permitted"
    keep_alive = StreamEvent("ping", b'{"type":"ping"}').sse()

    @property
    def beside(self) -> Sequence[SideRoute]:
        return (SideRoute("/count_tokens", "POST", "count_tokens", self._count),)

    def parse(self, body: bytes) -> Ask:
        return ask_of(parse_messages(body))

    @staticmethod
    async def _count(asking: SideRequest) -> bytes:
        """The tokens of a prompt."""
        count = await asking.count_tokens(lambda body: ask_of(parse_count(body)), asking.body)
        return orjson.dumps({"input_tokens": count})

    def whole(self, call: WritableCall, choices: Sequence[WritableChoice]) -> bytes:
        return _write_response(call, choices[0], with_thoughts=_shows(call))

    def record(self, call: WritableCall, choice: WritableChoice) -> bytes:
        return _write_response(call, choice, with_thoughts=True)

    def responses(self, call: WritableCall) -> tuple[bytes, list[bytes]]:
        (choice,) = call.choices
        response = self.whole(call, [choice])
        hides_thoughts = bool(choice.reasoning) and not _shows(call)
        return response, [self.record(call, choice) if hides_thoughts else response]

    def stream_writer(self, call: WritableCall) -> ReplyStream:
        return MessagesStream(call)

    def events_of(self, response: Mapping[str, Json]) -> list[StreamEvent]:
        if not self.wrote(response):
            return []
        end = {name: response.get(name) for name in ("stop_reason", "stop_sequence")}
        events: list[JsonObject] = [
            {"type": "message_start", "message": {**response, "content": [], **dict.fromkeys(end)}}
        ]
        for at, block in enumerate(map(mapping, listed(response.get("content")))):
            pieces = {kind: block[part] for kind, part in PIECES.items() if isinstance(block.get(part), str)}
            start = {**block, **{PIECES[kind]: "" for kind in pieces}}
            if isinstance(block.get("input"), dict):
                start["input"] = {}
                pieces["input_json_delta"] = orjson.dumps(block["input"]).decode()
            events.append({"type": "content_block_start", "index": at, "content_block": start})
            for kind, piece in pieces.items():
                delta = {"type": kind, PIECES[kind]: piece}
                events.append({"type": "content_block_delta", "index": at, "delta": delta})
            events.append({"type": "content_block_stop", "index": at})
        events += [
            {"type": "message_delta", "delta": end, "usage": mapping(response.get("usage"))},
            {"type": "message_stop"},
        ]
        return [StreamEvent(str(event["type"]), orjson.dumps(event)) for event in events]

    def error(self, error: ApiError) -> bytes:
        kind = TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        message = str(error)
        if error.param and not message.startswith(error.param):
            message = f"{error.param}: {message}"
        details = {"details": {"error_code": NO_THREADS, "unsupported": []}} if error.code == NO_THREADS else {}
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": message, **details}})

    def failure_event(self, error: ApiError) -> StreamEvent:
        return StreamEvent("error", self.error(error))

    def names(self, head: RequestHead) -> tuple[tuple[object, ...], str | None]:
        session = session_of(head.user_id)
        return (() if session else (head.user_id,)), session

    def wrote(self, response: Mapping[str, Json]) -> bool:
        return response.get("type") == "message" and isinstance(response.get("content"), list)

    def read(self, request: bytes, response: Mapping[str, Json]) -> RecordedCall:
        parsed_request = parse_any(request)
        parts = [part for block in listed(response.get("content")) if (part := _read(mapping(block))) is not None]
        (reply,) = messages_of([Turn("assistant", parts)])
        messages = messages_of(turns_of(parsed_request, strict=False), strict=False)
        stored_turn, behind = to_store(request, parsed_request.thread), previous_message(parsed_request.thread) or ""
        return RecordedCall(messages, tools_of(parsed_request.tools, strict=False), {0: reply}, stored_turn, behind)


class MessagesStream(ReplyStream):
    """Events of one message. At most one block is open."""

    def __init__(self, call: WritableCall) -> None:
        self._call = call
        self._shown = _shows(call)
        self._begun = False
        self._index = -1
        self._open: type[Text] | type[Thinking] | type[ToolUse] | None = None
        self._use = ""
        """the id of the call that is open"""
        self._size = 0
        """how much of its arguments is said"""
        self._thoughts: list[str] = []

    def take(self, choice: WritableChoice, parts: Sequence[Part], tokens: int) -> list[StreamEvent]:
        out = self._start()
        for part in parts:
            match part:
                case Text() if part.text:
                    self._into(Text, {"type": "text", "text": ""}, out)
                    self._delta({"type": "text_delta", "text": part.text}, out)
                case Thinking() if self._shown and part.text:
                    self._into(Thinking, {"type": "thinking", "thinking": "", "signature": ""}, out)
                    self._thoughts.append(part.text)
                    self._delta({"type": "thinking_delta", "thinking": part.text}, out)
                case ToolUsePiece():
                    self._use_begins(part, out)
                    self._delta({"type": "input_json_delta", "partial_json": part.arguments}, out)
                    self._size += len(part.arguments)
                case ToolUse():
                    self._use_begins(part, out)
                    if piece := part.arguments[self._size :] if self._size else _input(part).decode():
                        self._delta({"type": "input_json_delta", "partial_json": piece}, out)
                    self._close(out)
        return out

    def end(self) -> list[StreamEvent]:
        out = self._start()
        self._close(out)
        reason, stop = _stop_of(self._call, self._call.choices[0])
        delta = {"stop_reason": reason, "stop_sequence": stop}
        out.append(_event("message_delta", delta=delta, usage=_usage(self._call)))
        out.append(_event("message_stop"))
        return out

    def _start(self) -> list[StreamEvent]:
        if self._begun:
            return []
        self._begun = True
        usage = {**_usage(self._call), "output_tokens": 0}
        head = {**_head(self._call), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [_event("message_start", message=head)]

    def _use_begins(self, part: ToolUse | ToolUsePiece, out: list[StreamEvent]) -> None:
        if self._use != part.id:
            self._close(out)
            self._begin({"type": "tool_use", "id": part.id, "name": part.name, "input": {}}, out)
            self._open, self._use, self._size = ToolUse, part.id, 0

    def _into(self, kind: type[Text] | type[Thinking], block: JsonObject, out: list[StreamEvent]) -> None:
        if self._open is not kind:
            self._close(out)
            self._begin(block, out)
            self._open = kind

    def _begin(self, block: JsonObject, out: list[StreamEvent]) -> None:
        self._index += 1
        out.append(_event("content_block_start", index=self._index, content_block=block))

    def _delta(self, delta: JsonObject, out: list[StreamEvent]) -> None:
        out.append(_event("content_block_delta", index=self._index, delta=delta))

    def _close(self, out: list[StreamEvent]) -> None:
        if self._open is Thinking:
            self._delta({"type": "signature_delta", "signature": _signature("".join(self._thoughts))}, out)
            self._thoughts.clear()
        if self._open is not None:
            out.append(_event("content_block_stop", index=self._index))
        self._open, self._use = None, ""


def _event(kind: str, **fields: object) -> StreamEvent:
    return StreamEvent(kind, orjson.dumps({"type": kind, **fields}))


def _shows(call: WritableCall) -> bool:
    request = call.request.given
    return isinstance(request, MessagesRequest) and request.shows_thinking


def _head(call: WritableCall) -> JsonObject:
    return {"id": call.response_id, "type": "message", "role": "assistant", "model": call.request.model}


def _write_response(call: WritableCall, choice: WritableChoice, *, with_thoughts: bool) -> bytes:
    reason, stop = _stop_of(call, choice)
    content = [_block(part) for part in choice.parts() if with_thoughts or not isinstance(part, Thinking)]
    end = {"stop_reason": reason, "stop_sequence": stop}
    return orjson.dumps({**_head(call), "content": content, **end, "usage": _usage(call)})


def _block(part: Part) -> JsonObject:
    match part:
        case Thinking():
            return {"type": "thinking", "thinking": part.text, "signature": _signature(part.text)}
        case ToolUse():
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": orjson.Fragment(_input(part))}
        case Text():
            return {"type": "text", "text": part.text}
        case _:
            raise AssertionError(f"no model writes {type(part).__name__}")


def _read(block: Mapping[str, Json]) -> Part | None:
    """A block of a recorded reply."""
    match block.get("type"):
        case "text":
            return Text(text(block.get("text")) or "")
        case "thinking":
            return Thinking(text(block.get("thinking")) or "")
        case "tool_use":
            id, name = text(block.get("id")) or "", text(block.get("name")) or ""
            return ToolUse(id, name, arguments_of(block.get("input")))
        case _:
            return None


def _input(part: ToolUse) -> bytes:
    """The arguments of a call as JSON: the model's own text, within a string where it is none, or is itself a string,
    so that who reads it back knows which text it was."""
    try:
        if not shape.unwieldy(part.arguments) and not isinstance(orjson.loads(part.arguments), str):
            return part.arguments.strip().encode()
    except orjson.JSONDecodeError:
        pass
    return orjson.dumps(part.arguments)


def _signature(thoughts: str) -> str:
    """What stands for a signature: clients keep it and send it back, nobody checks it."""
    return b64encode(blake2b(thoughts.encode(errors="surrogatepass"), digest_size=24).digest()).decode()


def _stop_of(call: WritableCall, choice: WritableChoice) -> tuple[str, str | None]:
    """Why a reply ended, and the stop sequence that ended it."""
    if choice.reason == "tool_calls":
        return "tool_use", None
    if choice.reason == "length":
        return "model_context_window_exceeded" if call.is_shortened else "max_tokens", None
    if choice.reason == "content_filter":
        return "refusal", None
    if choice.reason == "stop" and isinstance(choice.stop, str):
        return "stop_sequence", choice.stop
    return "end_turn", None


def _usage(call: WritableCall) -> dict[str, int]:
    """Token counts as Anthropic reports them: what was read from a cache is not among the input."""
    return {
        "input_tokens": max(0, call.prompt_tokens - call.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": call.cached,
        "output_tokens": call.completion_tokens,
    }
