"""Requests to an upstream of chat completions, and its replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace.dialects.all import CHAT
from millrace.dialects.answers import WholeAnswer, answer_in, content, counts, listed, mapping, name, text, thinking
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
from millrace.dialects.reading.chat_assembler import ChoiceParts
from millrace.dialects.translation.base import ReplyListener, Translator, functions, uses
from millrace.dialects.translation.media import to_chat
from millrace.schemas.json_values import Json, JsonObject

ROLES = {"developer": "system"}
"""roles that many servers of this API do not know, by one that all do"""


class ToChat(Translator):
    """`POST /chat/completions`."""

    dialect = CHAT

    def request(self, ask: Ask) -> JsonObject:
        tools = functions(ask, by_choice=True)
        fields: JsonObject = {
            "model": ask.model,
            "messages": _conversation(ask.turns),
            "max_completion_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "top_k": ask.top_k or None,
            "stop": list(ask.stop) or None,
            "tools": tools and [{"type": "function", "function": function} for function in tools],
            "tool_choice": _choice(ask) if tools else None,
            "parallel_tool_calls": False if ask.tools and not ask.parallel else None,
            "response_format": _form(ask),
        }
        if ask.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return {field: value for field, value in fields.items() if value is not None}

    def whole(self, response: Mapping[str, Json]) -> tuple[WholeAnswer, str | None]:
        return answer_in(response), None

    def listener(self) -> ReplyListener:
        return ChatListener()


class ChatListener(ReplyListener):
    """Chunks. Calls of tools are whole when their choice is at its end: pieces of several may come in turns."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = ChoiceParts()

    def take(self, event: JsonObject) -> bool:
        facts = self.told
        facts.id = facts.id or name(event.get("id")) or ""
        if mapping(event.get("usage")):
            facts.usage = counts(event)
        for choice in listed(event.get("choices"))[:1]:
            self._choice(mapping(choice))
        return True

    def _choice(self, choice: Mapping[str, Json]) -> None:
        delta = mapping(choice.get("delta"))
        value = delta.get("content")
        if thoughts := text(delta.get("reasoning_content")) or text(delta.get("reasoning")) or thinking(value):
            self._heard.append(Thinking(thoughts))
        if words := content(value) or text(delta.get("refusal")):
            self._heard.append(Text(words))
        self._calls.take({"tool_calls": delta.get("tool_calls")})
        if finish := name(choice.get("finish_reason")):
            self.told.finish = finish
            self.closing = True
            self._heard += self.end()

    def end(self) -> list[Part]:
        calls = uses(self._calls.message().get("tool_calls", ()))
        self._calls = ChoiceParts()
        return calls


def _conversation(turns: Sequence[Turn]) -> list[JsonObject]:
    """All turns: the results of one reply's calls stand together, and what else their tools showed behind them."""
    out: list[JsonObject] = []
    attachments: list[JsonObject] = []
    for turn in turns:
        if turn.role != "tool":
            out += attachments
            attachments = []
        for message in _messages(turn):
            (attachments if turn.role == "tool" and message["role"] != "tool" else out).append(message)
    return out + attachments


def _messages(turn: Turn) -> list[JsonObject]:
    """One turn: results of tools are messages of their own. Thoughts of former replies are left out: no other model
    wrote them."""
    out: list[JsonObject] = []
    parts: list[Part] = []
    calls: list[JsonObject] = []
    for part in turn.parts:
        match part:
            case ToolResult():
                out.append({"role": "tool", "tool_call_id": part.call or "", "content": part.text})
            case ToolUse():
                function = {"name": part.name, "arguments": part.arguments}
                calls.append({"id": part.id, "type": "function", "function": function})
            case Text() | ModelRefusal() | Media():
                parts.append(part)
    if parts or calls or not out:
        message: JsonObject = {"role": ROLES.get(turn.role, turn.role), "content": _content(parts) or None}
        if message["role"] == "tool":  # beside its results: what is no text
            message["role"] = "user"
        if calls:
            message["tool_calls"] = calls
        elif message["content"] is None:
            message["content"] = ""
        out.append(message)
    return out


def _content(parts: Sequence[Part]) -> str | list[JsonObject]:
    texts = [part.text for part in parts if isinstance(part, Text | ModelRefusal)]
    if len(texts) == len(parts):
        return "".join(texts)
    return [
        to_chat(part) if isinstance(part, Media) else {"type": "text", "text": part.text}
        for part in parts
        if isinstance(part, Text | ModelRefusal | Media)
    ]


def _choice(ask: Ask) -> Json:
    if not isinstance(ask.choice, ForcedCalls):
        return None if ask.choice == "auto" else ask.choice
    if len(ask.choice.names) != 1:
        return "required"
    return {"type": "function", "function": {"name": ask.choice.names[0]}}


def _form(ask: Ask) -> JsonObject | None:
    if ask.output is None:
        return None
    if ask.output.schema is None:
        return {"type": "json_object"}
    reply_schema: JsonObject = {"name": "reply", "schema": ask.output.schema, "strict": ask.output.strict}
    return {"type": "json_schema", "json_schema": reply_schema}
