"""OpenAI's Responses: one reply of typed items, streamed as numbered events.

Invariants: an item is written whole before the next begins; the items of `response.completed` are those that were
streamed; ids of items follow from the id of the response, so a reply has the same ones whole and in its record; the
arguments of a call are the model's own text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import orjson

from millrace.dialects.answers import arguments_text, listed, mapping, text
from millrace.dialects.base import Dialect, ReplyStream, SideRequest, SideRoute, StreamEvent, WholeRequest
from millrace.dialects.conversation import (
    Ask,
    ForcedCalls,
    Part,
    Text,
    Thinking,
    ToolUse,
    ToolUsePiece,
    Turn,
    messages_of,
    unsupported_error,
)
from millrace.dialects.errors import ApiError
from millrace.dialects.reading.reader import RecordedCall
from millrace.dialects.responses.expand import expand, named_ids, names_of, names_others, refers, to_store
from millrace.dialects.responses.items import page
from millrace.dialects.responses.reader import ENDS, ResponsesReader
from millrace.dialects.responses.request import ResponsesRequest, ask_of, parse_any, parse_responses, turns_of
from millrace.dialects.responses.tools import custom_arguments, full_name, tools_of
from millrace.dialects.stored_responses import Recaller, StoredResponse, no_recall
from millrace.dialects.writable import WritableCall, WritableChoice
from millrace.infra.engines.base import ABORT
from millrace.infra.process.offload import run_aside
from millrace.schemas.json_values import Json, JsonObject

ABORT_ERROR = {"code": "server_error", "message": "The engine aborted this reply: try again"}
INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""why a response is incomplete, by OpenAI's finish reason of chat completions"""
PARTS = {
    "message": ("content", "content_part", "output_text", "content_index"),
    "reasoning": ("summary", "reasoning_summary_part", "reasoning_summary_text", "summary_index"),
}
"""by the type of an item that has parts with text: their field, and the words for them in events"""
Item = JsonObject


class Responses(Dialect):
    """`POST /v1/responses`."""

    name = "responses"
    path = "/v1/responses"
    prefix = "resp_"
    unknown = "Unknown parameter: '{}'."
    reader = ResponsesReader

    @property
    def beside(self) -> Sequence[SideRoute]:
        return (
            SideRoute("/{id}", "GET", "response", self._kept),
            SideRoute("/{id}", "DELETE", "delete_response", self._deleted),
            SideRoute("/{id}/input_items", "GET", "input_items", self._items),
        )

    def keeper(self, asking: SideRequest) -> str | None:
        return asking.recall().keeper(asking.id)

    @staticmethod
    async def _kept(asking: SideRequest) -> bytes:
        """A response that is stored."""
        response = asking.recall().response(asking.id)
        if response is None:
            raise _unknown(asking)
        if asking.query.get("stream", "false").lower() not in ("false", "0"):
            raise unsupported_error("stream", "a stored response is given whole")
        return response

    @staticmethod
    async def _deleted(asking: SideRequest) -> bytes:
        """A response that can be named no more."""
        if asking.recall().response(asking.id) is None:
            raise _unknown(asking)
        await asking.delete(asking.id)
        return orjson.dumps({"id": asking.id, "object": "response", "deleted": True})

    @staticmethod
    async def _items(asking: SideRequest) -> bytes:
        """A page of what a stored response was asked with."""
        recall = asking.recall()
        items = None if recall.response(asking.id) is None else recall.request_items(asking.id)
        if items is None:
            raise _unknown(asking)
        return await run_aside(sum(map(len, items)), _page, items, asking)

    def parse(self, body: bytes) -> Ask:
        return self.understand(body, no_recall).request

    def refers(self, body: bytes) -> bool:
        return refers(body)

    def named_in(self, body: bytes) -> list[str]:
        return named_ids(parse_any(body)) if refers(body) else []

    def understand(self, body: bytes, recaller: Recaller) -> WholeRequest:
        request, used = parse_responses(body), list[StoredResponse]()
        if names_others(request):
            recall = recaller((request.user, request.safety_identifier))
            body = expand(request, body, recall)
            request, used = parse_responses(body), recall.used
        ask = ask_of(request)
        ask.stored = to_store(request)
        return WholeRequest(ask, body, used)

    def whole(self, call: WritableCall, choices: Sequence[WritableChoice]) -> bytes:
        (choice,) = choices
        parts = [*choice.parts()]
        if not any(isinstance(part, Text | ToolUse) for part in parts):
            parts.append(Text(""))
        output = [_item(call, at, part, _status(choice)) for at, part in enumerate(parts)]
        return orjson.dumps(_response(call, choice, output))

    def stream_writer(self, call: WritableCall) -> ReplyStream:
        return ResponsesStream(call)

    def events_of(self, response: Mapping[str, Json]) -> list[StreamEvent]:
        if not self.wrote(response):
            return []
        start = {**response, "status": "in_progress", "output": [], "usage": None}
        events: list[JsonObject] = [{"type": "response.created", "response": start}]
        for at, item in enumerate(map(mapping, listed(response.get("output")))):
            events += [
                {"type": f"response.{event.pop('kind')}", "output_index": at, **event} for event in _events_for(item)
            ]
        end = f"response.{response.get('status')}"
        events.append({"type": end if end in ENDS else "response.completed", "response": response})
        numbered_events = [{"sequence_number": number, **event} for number, event in enumerate(events)]
        return [StreamEvent(str(event["type"]), orjson.dumps(event)) for event in numbered_events]

    def error(self, error: ApiError) -> bytes:
        return error.body()

    def failure_event(self, error: ApiError) -> StreamEvent:
        details = {"type": error.type, "code": error.code, "message": str(error), "param": error.param}
        flat = {"code": error.code, "message": str(error), "param": error.param}
        return StreamEvent("error", orjson.dumps({"type": "error", **flat, "error": details}))

    def wrote(self, response: Mapping[str, Json]) -> bool:
        return response.get("object") == "response" and isinstance(response.get("output"), list)

    def read(self, request: bytes, response: Mapping[str, Json]) -> RecordedCall:
        parsed_request = parse_any(request)
        parts = [part for item in listed(response.get("output")) for part in _read(mapping(item))]
        (reply,) = messages_of([Turn("assistant", parts)])
        messages = messages_of(turns_of(parsed_request, strict=False), strict=False)
        tools = tools_of(parsed_request.tools, strict=False)
        return RecordedCall(messages, tools, {0: reply}, to_store(parsed_request), names_of(parsed_request))


def _events_for(item: Mapping[str, Json]) -> list[JsonObject]:
    """The events that say an item that is whole: its texts and its arguments in one piece each."""
    out: list[JsonObject] = []
    start, of = dict(item), {"item_id": item.get("id")}
    kind = text(item.get("type"))
    if kind == "function_call" and (words := text(item.get("arguments"))) is not None:
        start["arguments"] = ""
        out.append({"kind": "function_call_arguments.delta", **of, "delta": words})
        out.append({"kind": "function_call_arguments.done", **of, "arguments": words})
    if kind in PARTS:
        field, noun, text_noun, index = PARTS[kind]
        start[field] = []
        for at, part in enumerate(map(mapping, listed(item.get(field)))):
            of[index], words = at, text(part.get("text"))
            out.append({"kind": f"{noun}.added", **of, "part": {**part, "text": ""} if words else part})
            if words:
                out.append({"kind": f"{text_noun}.delta", **of, "delta": words})
                out.append({"kind": f"{text_noun}.done", **of, "text": words})
            out.append({"kind": f"{noun}.done", **of, "part": part})
    return [{"kind": "output_item.added", "item": start}, *out, {"kind": "output_item.done", "item": item}]


def _unknown(asking: SideRequest) -> ApiError:
    return ApiError(404, f"Response with id '{asking.id}' not found.")


def _page(items: Sequence[bytes], asking: SideRequest) -> bytes:
    return msgspec.json.encode(page([msgspec.json.decode(item) for item in items], asking.id, asking.query))


class ResponsesStream(ReplyStream):
    """Events of one response. At most one item is open."""

    def __init__(self, call: WritableCall) -> None:
        self._call = call
        self._number = 0
        self._output: list[Item] = []
        """items that are at their end"""
        self._open: type[Text] | type[Thinking] | None = None
        self._use: Item | None = None
        """the call that is open"""
        self._size = 0
        """how much of its arguments is said"""
        self._broken = 0
        """calls that the model broke off"""
        self._said: list[str] = []
        """what the open item says"""

    def take(self, choice: WritableChoice, parts: Sequence[Part], tokens: int) -> list[StreamEvent]:
        out = self._start()
        for part in parts:
            match part:
                case Text() | Thinking() if part.text:
                    self._into(type(part), out)
                    self._said.append(part.text)
                    self._delta(part, out)
                case ToolUsePiece():
                    self._call_begins(part, out)
                    self._call_delta(part.arguments, out)
                case ToolUse():
                    self._call_begins(part, out)
                    if len(part.arguments) > self._size or not self._size:
                        self._call_delta(part.arguments[self._size :], out)
                    self._call_ends(part.arguments, out)
        return out

    def end(self) -> list[StreamEvent]:
        out = self._start()
        (choice,) = self._call.choices
        status = _status(choice)
        self._close(status, out)
        if all(item["type"] == "reasoning" for item in self._output):
            self._into(Text, out)
            self._close(status, out)
        self._event(f"response.{status}", out, response=_response(self._call, choice, self._output))
        return out

    def _start(self) -> list[StreamEvent]:
        out: list[StreamEvent] = []
        if not self._number:
            response = _response(self._call, None, [])
            self._event("response.created", out, response=response)
            self._event("response.in_progress", out, response=response)
        return out

    def _event(self, kind: str, out: list[StreamEvent], **fields: object) -> None:
        out.append(StreamEvent(kind, orjson.dumps({"type": kind, "sequence_number": self._number, **fields})))
        self._number += 1

    def _of_item(self, kind: str, out: list[StreamEvent], **fields: object) -> None:
        """An event of the item that is open, or about to be."""
        self._event(f"response.{kind}", out, output_index=len(self._output) + self._broken, **fields)

    def _into(self, kind: type[Text] | type[Thinking], out: list[StreamEvent]) -> None:
        if self._open is kind:
            return
        self._close("completed", out)
        self._open = kind
        item = _item(self._call, len(self._output), kind(""), "in_progress")
        item["content" if kind is Text else "summary"] = []
        self._of_item("output_item.added", out, item=item)
        if kind is Text:
            self._of_item("content_part.added", out, item_id=item["id"], content_index=0, part=_text(""))
        else:
            part = {"type": "summary_text", "text": ""}
            self._of_item("reasoning_summary_part.added", out, item_id=item["id"], summary_index=0, part=part)

    def _delta(self, part: Text | Thinking, out: list[StreamEvent]) -> None:
        id = _id(self._call, len(self._output), part)
        if isinstance(part, Text):
            at = {"item_id": id, "content_index": 0, "logprobs": []}
            self._of_item("output_text.delta", out, **at, delta=part.text)
        else:
            self._of_item("reasoning_summary_text.delta", out, item_id=id, summary_index=0, delta=part.text)

    def _close(self, status: str, out: list[StreamEvent]) -> None:
        if self._use is not None:
            self._call_breaks(out)
        if self._open is None:
            return
        part = self._open("".join(self._said))
        item = _item(self._call, len(self._output), part, status)
        if isinstance(part, Text):
            at: JsonObject = {"item_id": item["id"], "content_index": 0}
            self._of_item("output_text.done", out, **at, text=part.text, logprobs=[])
            self._of_item("content_part.done", out, **at, part=listed(item["content"])[0])
        else:
            at = {"item_id": item["id"], "summary_index": 0}
            self._of_item("reasoning_summary_text.done", out, **at, text=part.text)
            self._of_item("reasoning_summary_part.done", out, **at, part=listed(item["summary"])[0])
        self._of_item("output_item.done", out, item=item)
        self._output.append(item)
        self._open = None
        self._said.clear()

    def _call_begins(self, part: ToolUse | ToolUsePiece, out: list[StreamEvent]) -> None:
        if self._use is not None and self._use["call_id"] == part.id:
            return
        self._close("completed", out)
        item = _item(self._call, len(self._output), ToolUse(part.id, part.name, ""), "in_progress")
        self._use, self._size = {**item, "status": "in_progress"}, 0
        self._of_item("output_item.added", out, item=self._use)

    def _call_delta(self, piece: str, out: list[StreamEvent]) -> None:
        assert self._use is not None
        self._of_item("function_call_arguments.delta", out, item_id=self._use["id"], delta=piece)
        self._said.append(piece)
        self._size += len(piece)

    def _call_ends(self, arguments: str, out: list[StreamEvent]) -> None:
        assert self._use is not None
        item, self._use = {**self._use, "arguments": arguments, "status": "completed"}, None
        fields = {"item_id": item["id"], "name": item["name"], "arguments": arguments}
        self._of_item("function_call_arguments.done", out, **fields)
        self._of_item("output_item.done", out, item=item)
        self._output.append(item)
        self._said.clear()

    def _call_breaks(self, out: list[StreamEvent]) -> None:
        """The model broke a call off, which is text in the whole reply: it is no item of that."""
        assert self._use is not None
        item, self._use = {**self._use, "arguments": "".join(self._said), "status": "incomplete"}, None
        self._of_item("output_item.done", out, item=item)
        self._broken += 1
        self._said.clear()


def _status(choice: WritableChoice) -> str:
    """How a reply ended: completed, incomplete, failed."""
    if choice.reason == ABORT:
        return "failed"
    return "incomplete" if choice.reason in INCOMPLETE_REASONS else "completed"


def _response(call: WritableCall, choice: WritableChoice | None, output: Sequence[Item]) -> JsonObject:
    """The response, of no choice while it is in progress. What was asked is not said again at length."""
    request = call.request.given
    assert isinstance(request, ResponsesRequest)
    status = "in_progress" if choice is None else _status(choice)
    return {
        "id": call.response_id,
        "object": "response",
        "created_at": call.when // 1_000_000,
        "status": status,
        "error": ABORT_ERROR if status == "failed" else None,
        "incomplete_details": {"reason": INCOMPLETE_REASONS[choice.reason]}
        if choice and status == "incomplete"
        else None,
        "instructions": None,
        "max_output_tokens": request.max_output_tokens,
        "metadata": {},
        "model": call.request.model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": request.previous_response_id,
        "store": request.store is not False and call.keeps,
        "temperature": call.temperature,
        "tool_choice": _choice(call.request.choice),
        "tools": [],
        "top_p": call.top_p,
        "usage": None if choice is None else _usage(call),
    }


def _choice(choice: str | ForcedCalls) -> Json:
    """Which tools were asked for."""
    if not isinstance(choice, ForcedCalls):
        return choice
    if not choice.names:
        return "required"
    tools = [{"type": "function", "name": name} for name in choice.names]
    return tools[0] if len(tools) == 1 else {"type": "allowed_tools", "mode": "required", "tools": tools}


def _id(call: WritableCall, at: int, part: Part) -> str:
    """The id of item `at`: calls have one of their own already."""
    if isinstance(part, ToolUse):
        return f"fc_{part.id.removeprefix('call_')}"
    base = call.response_id.removeprefix(Responses.prefix)
    return f"{'rs' if isinstance(part, Thinking) else 'msg'}_{base}_{at}"


def _item(call: WritableCall, at: int, part: Part, status: str) -> Item:
    """One item of the output."""
    id = _id(call, at, part)
    match part:
        case Thinking():
            return {"id": id, "type": "reasoning", "summary": [{"type": "summary_text", "text": part.text}]}
        case ToolUse():
            fields = {"call_id": part.id, **_client_name(call, part.name), "arguments": part.arguments}
            return {"id": id, "type": "function_call", "status": "completed", **fields}
        case Text():
            item_status = "incomplete" if status == "failed" else status
            return {
                "id": id,
                "type": "message",
                "role": "assistant",
                "status": item_status,
                "content": [_text(part.text)],
            }
        case _:
            raise AssertionError(f"no model writes {type(part).__name__}")


def _client_name(call: WritableCall, name: str) -> JsonObject:
    """A tool in its client's words."""
    if name not in call.request.inside:
        return {"name": name}
    namespace, tool_name = call.request.inside[name]
    return {"name": tool_name, "namespace": namespace}


def _text(words: str) -> JsonObject:
    return {"type": "output_text", "text": words, "annotations": [], "logprobs": []}


def _read(item: Mapping[str, Json]) -> list[Part]:
    """An item of a recorded reply."""
    match item.get("type"):
        case "message":
            parts = [mapping(part) for part in listed(item.get("content"))]
            return [Text(text(part.get("text")) or text(part.get("refusal")) or "") for part in parts]
        case "reasoning":
            thoughts = [mapping(part) for field in ("summary", "content") for part in listed(item.get(field))]
            return [Thinking(text(part.get("text")) or "") for part in thoughts]
        case "function_call":
            id, name = text(item.get("call_id")) or "", full_name(item, text(item.get("name")) or "")
            return [ToolUse(id, name, arguments_text(item.get("arguments")))]
        case "custom_tool_call":
            id, name = text(item.get("call_id")) or "", full_name(item, text(item.get("name")) or "")
            return [ToolUse(id, name, custom_arguments(text(item.get("input")) or ""))]
        case _:
            return []


def _usage(call: WritableCall) -> JsonObject:
    """Token counts as OpenAI reports them here."""
    prompt, completion = call.prompt_tokens, call.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": call.cached},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
