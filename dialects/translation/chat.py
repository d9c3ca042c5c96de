"""Requests to an upstream of chat completions, and its replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace.dialects.all import CHAT
from millrace.dialects.answers import WholeAnswer, content, counts, listed, mapping, name, text, thinking, understood
from millrace.dialects.conversation import (
    Ask,
    Forced,
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
        offered = functions(ask, chosen=True)
        said: JsonObject = {
            "model": ask.model,
            "messages": _conversation(ask.turns),
            "max_completion_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "top_k": ask.top_k or None,
            "stop": list(ask.stop) or None,
            "tools": offered and [{"type": "function", "function": function} for function in offered],
            "tool_choice": _choice(ask) if offered else None,
            "parallel_tool_calls": False if ask.tools and not ask.parallel else None,
            "response_format": _form(ask),
        }
        if ask.stream:
            said |= {"stream": True, "stream_options": {"include_usage": True}}
        return {field: given for field, given in said.items() if given is not None}

    def whole(self, found: Mapping[str, Json]) -> tuple[WholeAnswer, str | None]:
        return understood(found), None

    def listener(self) -> ReplyListener:
        return ChatListener()


class ChatListener(ReplyListener):
    """Chunks. Calls of tools are whole when their choice is at its end: pieces of several may come in turns."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = ChoiceParts()

    def take(self, event: JsonObject) -> bool:
        told = self.told
        told.id = told.id or name(event.get("id")) or ""
        if mapping(event.get("usage")):
            told.usage = counts(event)
        for choice in listed(event.get("choices"))[:1]:
            self._choice(mapping(choice))
        return True

    def _choice(self, choice: Mapping[str, Json]) -> None:
        delta = mapping(choice.get("delta"))
        given = delta.get("content")
        if thoughts := text(delta.get("reasoning_content")) or text(delta.get("reasoning")) or thinking(given):
            self._heard.append(Thinking(thoughts))
        if said := content(given) or text(delta.get("refusal")):
            self._heard.append(Text(said))
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
    shown: list[JsonObject] = []
    for turn in turns:
        if turn.role != "tool":
            out += shown
            shown = []
        for message in _messages(turn):
            (shown if turn.role == "tool" and message["role"] != "tool" else out).append(message)
    return out + shown


def _messages(turn: Turn) -> list[JsonObject]:
    """One turn: results of tools are messages of their own. Thoughts of former replies are left out: no other model
    wrote them."""
    out: list[JsonObject] = []
    said: list[Part] = []
    calls: list[JsonObject] = []
    for part in turn.parts:
        match part:
            case ToolResult():
                out.append({"role": "tool", "tool_call_id": part.call or "", "content": part.text})
            case ToolUse():
                function = {"name": part.name, "arguments": part.arguments}
                calls.append({"id": part.id, "type": "function", "function": function})
            case Text() | ModelRefusal() | Media():
                said.append(part)
    if said or calls or not out:
        message: JsonObject = {"role": ROLES.get(turn.role, turn.role), "content": _content(said) or None}
        if message["role"] == "tool":  # beside its results: what is no text
            message["role"] = "user"
        if calls:
            message["tool_calls"] = calls
        elif message["content"] is None:
            message["content"] = ""
        out.append(message)
    return out


def _content(said: Sequence[Part]) -> str | list[JsonObject]:
    texts = [part.text for part in said if isinstance(part, Text | ModelRefusal)]
    if len(texts) == len(said):
        return "".join(texts)
    return [
        to_chat(part) if isinstance(part, Media) else {"type": "text", "text": part.text}
        for part in said
        if isinstance(part, Text | ModelRefusal | Media)
    ]


def _choice(ask: Ask) -> Json:
    if not isinstance(ask.choice, Forced):
        return None if ask.choice == "auto" else ask.choice
    if len(ask.choice.names) != 1:
        return "required"
    return {"type": "function", "function": {"name": ask.choice.names[0]}}


def _form(ask: Ask) -> JsonObject | None:
    if ask.output is None:
        return None
    if ask.output.schema is None:
        return {"type": "json_object"}
    held: JsonObject = {"name": "reply", "schema": ask.output.schema, "strict": ask.output.strict}
    return {"type": "json_schema", "json_schema": held}
