"""Requests to an upstream of Anthropic's Messages, and its replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import orjson

from millrace.dialects import shape
from millrace.dialects.all import MESSAGES, reader
from millrace.dialects.answers import WholeAnswer, arguments_text, mapping, name, number, text
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
    unsupported_error,
)
from millrace.dialects.messages.reader import FINISH
from millrace.dialects.translation.base import ReplyListener, Translator, functions, refuse
from millrace.dialects.translation.media import to_messages
from millrace.schemas.json_values import Json, JsonObject

MOST = 4096
"""tokens of a reply where its client says nothing: this API must be told"""
VERSION = "2023-06-01"


class ToMessages(Translator):
    """`POST /messages`."""

    dialect = MESSAGES
    headers: ClassVar[Mapping[str, str]] = {"anthropic-version": VERSION}

    def request(self, ask: Ask) -> JsonObject:
        refuse(ask, "Messages", {
            "n": ask.n > 1,
            "logprobs": ask.logprobs,
            "presence_penalty": ask.presence_penalty != 0,
            "frequency_penalty": ask.frequency_penalty != 0,
            "repetition_penalty": ask.repetition_penalty != 1,
            "min_p": ask.min_p != 0,
            "logit_bias": bool(ask.logit_bias),
            ask.output.param if ask.output is not None else "": ask.output is not None,
        })  # fmt: skip
        system, rest = _split(ask.turns)
        tools = functions(ask, by_choice=True)
        fields: JsonObject = {
            "model": ask.model,
            "max_tokens": MOST if ask.max_tokens is None else ask.max_tokens,
            "system": system or None,
            "messages": _messages(rest),
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "top_k": ask.top_k or None,
            "stop_sequences": list(ask.stop) or None,
            "tools": tools and [_tool(function) for function in tools],
            "tool_choice": _choice(ask) if ask.tools else None,
            "stream": ask.stream or None,
        }
        return {field: value for field, value in fields.items() if value is not None}

    def whole(self, response: Mapping[str, Json]) -> tuple[WholeAnswer, str | None]:
        return reader(MESSAGES).answer_in(response), text(response.get("stop_sequence"))

    def listener(self) -> ReplyListener:
        return MessagesListener()


class MessagesListener(ReplyListener):
    """Named events. At most one call of a tool is open."""

    def __init__(self) -> None:
        super().__init__()
        self._use: JsonObject | None = None
        self._input: list[str] = []
        self._counts: dict[str, int] = {}

    def take(self, event: JsonObject) -> bool:
        match event.get("type"):
            case "message_start":
                message = mapping(event.get("message"))
                self.told.id = name(message.get("id")) or ""
                self._count(message.get("usage"))
            case "content_block_start":
                self._begin(mapping(event.get("content_block")))
            case "content_block_delta":
                self._delta(mapping(event.get("delta")))
            case "content_block_stop":
                self._stop()
            case "message_delta":
                self._stop()
                delta = mapping(event.get("delta"))
                reason = name(delta.get("stop_reason"))
                self.told.finish = FINISH.get(reason or "", reason) or self.told.finish
                self.told.stop = text(delta.get("stop_sequence"))
                self.closing |= reason is not None
                self._count(event.get("usage"))
            case "message_stop":
                self._stop()
                self.closing = True
        return True

    def _count(self, usage: object) -> None:
        fields = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        self._counts |= {field: number(mapping(usage).get(field)) for field in fields if field in mapping(usage)}
        prompt, completion, read, creation = (self._counts.get(field, 0) for field in fields)
        self.told.usage = (number(prompt + read + creation), completion, read)

    def _begin(self, block: Mapping[str, Json]) -> None:
        self._stop()
        if block.get("type") == "tool_use":
            self._use, self._input = dict(block), []
        elif words := text(block.get("text")):
            self._heard.append(Text(words))
        elif thoughts := text(block.get("thinking")):
            self._heard.append(Thinking(thoughts))

    def _delta(self, delta: Mapping[str, Json]) -> None:
        match delta.get("type"):
            case "text_delta" if words := text(delta.get("text")):
                self._heard.append(Text(words))
            case "thinking_delta" if thoughts := text(delta.get("thinking")):
                self._heard.append(Thinking(thoughts))
            case "input_json_delta" if piece := arguments_text(delta.get("partial_json")):
                self._input.append(piece)

    def _stop(self) -> None:
        if self._use is None:
            return
        value = self._use.get("input")
        arguments = "".join(self._input) or arguments_text(value) or "{}"
        self._heard.append(ToolUse(text(self._use.get("id")) or "", text(self._use.get("name")) or "", arguments))
        self._use = None


def _split(turns: Sequence[Turn]) -> tuple[str, list[Turn]]:
    """The instructions that a conversation begins with, and the rest of it; instructions alone are what is asked."""
    texts, at = list[str](), 0
    while at < len(turns) and turns[at].role in ("system", "developer"):
        for part in turns[at].parts:
            if isinstance(part, Media):
                raise unsupported_error(
                    part.at, f"instructions are text where the upstream speaks Messages, not {part.type!r}"
                )
            texts += [part.text] if isinstance(part, Text | ModelRefusal) else []
        at += 1
    if at == len(turns):
        return "", list(turns)
    return "\n\n".join(filter(None, texts)), list(turns[at:])


def _messages(turns: Sequence[Turn]) -> list[JsonObject]:
    """Turns of user and assistant by turns, as this API wants them: later instructions and results of tools are the
    user's; results stand before what else the user says."""
    messages: list[tuple[str, list[JsonObject]]] = []
    for turn in turns:
        role = "assistant" if turn.role == "assistant" else "user"
        blocks = [block for part in turn.parts if (block := _block(part)) is not None]
        if not blocks and messages:
            continue
        if messages and messages[-1][0] == role:
            messages[-1][1].extend(blocks)
        else:
            messages.append((role, blocks))
    for _, blocks in messages:
        blocks.sort(key=lambda block: block["type"] != "tool_result")  # stable
    return [{"role": role, "content": blocks or [{"type": "text", "text": ""}]} for role, blocks in messages]


def _block(part: Part) -> JsonObject | None:
    """One part; None for an empty text, which this API refuses, and for thoughts, which no other model wrote."""
    match part:
        case Text() | ModelRefusal():
            return {"type": "text", "text": part.text} if part.text else None
        case ToolUse():
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": _input(part.arguments)}
        case ToolResult():
            return {"type": "tool_result", "tool_use_id": part.call or "", "content": part.text}
        case Media():
            return to_messages(part)
        case _:
            return None


def _input(arguments: str) -> JsonObject:
    """The arguments of a call as the object that this API wants; text that is none within one."""
    try:
        value = None if shape.unwieldy(arguments) else orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"input": arguments}


def _tool(function: Mapping[str, Json]) -> JsonObject:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    about = {"description": function["description"]} if function.get("description") else {}
    strict = {"strict": True} if function.get("strict") else {}
    return {"name": function.get("name"), **about, "input_schema": schema, **strict}


def _choice(ask: Ask) -> JsonObject | None:
    alone = {} if ask.parallel else {"disable_parallel_tool_use": True}
    if ask.choice == "none":
        return {"type": "none"}
    if not isinstance(ask.choice, ForcedCalls):
        return {"type": "auto", **alone} if alone else None
    if len(ask.choice.names) == 1:
        return {"type": "tool", "name": ask.choice.names[0], **alone}
    return {"type": "any", **alone}
