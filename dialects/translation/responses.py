"""Requests to an upstream of OpenAI's Responses, and its replies. Nothing is stored there."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.dialects.all import RESPONSES, reader
from millrace.dialects.answers import WholeAnswer, arguments_text, error_in, mapping, name, text
from millrace.dialects.conversation import (
    Ask,
    ForcedCalls,
    Media,
    ModelRefusal,
    Part,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
    Turn,
)
from millrace.dialects.reading.events import NO_WORDS
from millrace.dialects.responses.reader import ENDS
from millrace.dialects.translation.base import ReplyListener, Translator, functions, refuse
from millrace.dialects.translation.media import to_responses
from millrace.infra.errors import EngineUnavailable
from millrace.schemas.json_values import Json, JsonObject

FAILURES = ("failed", "cancelled")
TEXTS = ("response.output_text.delta", "response.refusal.delta")
THOUGHTS = ("response.reasoning_summary_text.delta", "response.reasoning_text.delta")


class ToResponses(Translator):
    """`POST /responses`."""

    dialect = RESPONSES

    def request(self, ask: Ask) -> JsonObject:
        refuse(ask, "Responses", {
            "n": ask.n > 1,
            "logprobs": ask.logprobs,
            "stop": bool(ask.stop),
            "top_k": bool(ask.top_k),
            "presence_penalty": ask.presence_penalty != 0,
            "frequency_penalty": ask.frequency_penalty != 0,
            "repetition_penalty": ask.repetition_penalty != 1,
            "min_p": ask.min_p != 0,
            "logit_bias": bool(ask.logit_bias),
        })  # fmt: skip
        tools = functions(ask)
        fields: JsonObject = {
            "model": ask.model,
            "input": [item for turn in ask.turns for item in _items(turn)],
            "max_output_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "tools": tools and [_tool(function) for function in tools],
            "tool_choice": _choice(ask) if ask.tools else None,
            "parallel_tool_calls": False if ask.tools and not ask.parallel else None,
            "text": _form(ask),
            "stream": ask.stream or None,
            "store": False,
        }
        return {field: value for field, value in fields.items() if value is not None}

    def whole(self, response: Mapping[str, Json]) -> tuple[WholeAnswer, str | None]:
        if response.get("status") in FAILURES:
            raise EngineUnavailable("the response failed", status=200, words=_why(response))
        return reader(RESPONSES).answer_in(response), None

    def listener(self) -> ReplyListener:
        return ResponsesListener()


class ResponsesListener(ReplyListener):
    """Numbered events. A call of a tool is whole when its item is done."""

    def take(self, event: JsonObject) -> bool:
        kind = event.get("type")
        if kind in TEXTS:
            self._say(Text, event)
        elif kind in THOUGHTS:
            self._say(Thinking, event)
        elif kind == "response.output_item.done":
            item = mapping(event.get("item"))
            if item.get("type") == "function_call":
                id, tool_name = (text(item.get(field)) or "" for field in ("call_id", "name"))
                self._heard.append(ToolUse(id, tool_name, arguments_text(item.get("arguments")) or "{}"))
        elif kind == "response.created":
            self.told.id = name(mapping(event.get("response")).get("id")) or ""
        elif kind in ENDS:
            self._end(mapping(event.get("response")))
        return True

    def _say(self, kind: type[Text] | type[Thinking], event: Mapping[str, Json]) -> None:
        if words := text(event.get("delta")):
            self._heard.append(kind(words))

    def _end(self, response: Mapping[str, Json]) -> None:
        answer = reader(RESPONSES).answer_in(response)
        self.told.usage, self.told.finish = answer.usage, answer.choices[0].finish
        self.closing = True
        if response.get("status") in FAILURES:
            self.error = _why(response)


def _why(response: Mapping[str, Json]) -> str:
    """Why a response failed, in the upstream's words."""
    return error_in(response) or NO_WORDS


def _items(turn: Turn) -> list[JsonObject]:
    """One turn: its message first, then its calls and results, each an item. Thoughts of former replies are left out:
    no other model wrote them."""
    content: list[JsonObject] = []
    rest: list[JsonObject] = []
    for part in turn.parts:
        match part:
            case ToolUse():
                rest.append(
                    {"type": "function_call", "call_id": part.id, "name": part.name, "arguments": part.arguments}
                )
            case ToolResult():
                rest.append({"type": "function_call_output", "call_id": part.call or "", "output": part.text})
            case Text() | ModelRefusal() | Media():
                content.append(_part(turn.role, part))
    role = "user" if turn.role == "tool" else turn.role
    if not content and not rest:  # a turn that says nothing is one all the same
        content.append(_part(role, Text("")))
    message: list[JsonObject] = [{"type": "message", "role": role, "content": content}] if content else []
    return [*message, *rest] if turn.role == "assistant" else [*rest, *message]


def _part(role: str, part: Part) -> JsonObject:
    if isinstance(part, Media):
        return to_responses(part)
    assert isinstance(part, Text | ModelRefusal)
    if role == "assistant":
        return {"type": "output_text", "text": part.text, "annotations": []}
    return {"type": "input_text", "text": part.text}


def _tool(function: Mapping[str, Json]) -> JsonObject:
    """A function. This API takes schemas for strict ones, which most are not, unless it is told."""
    about = {field: function[field] for field in ("description", "parameters") if function.get(field) is not None}
    return {"type": "function", "name": function.get("name"), **about, "strict": bool(function.get("strict"))}


def _choice(ask: Ask) -> Json:
    if not isinstance(ask.choice, ForcedCalls):
        return None if ask.choice == "auto" else ask.choice
    tools = [{"type": "function", "name": name} for name in ask.choice.names]
    if not tools:
        return "required"
    return tools[0] if len(tools) == 1 else {"type": "allowed_tools", "mode": "required", "tools": tools}


def _form(ask: Ask) -> JsonObject | None:
    if ask.output is None:
        return None
    if ask.output.schema is None:
        return {"format": {"type": "json_object"}}
    reply_schema: JsonObject = {"name": "reply", "schema": ask.output.schema, "strict": ask.output.strict}
    return {"format": {"type": "json_schema", **reply_schema}}
