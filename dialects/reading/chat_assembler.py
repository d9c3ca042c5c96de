"""A streamed chat completion put together again, while its bytes go on to the client untouched.

Invariant: memory is bounded by the bounds on choices and tool calls too, whatever indexes the server writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from millrace.dialects import shape
from millrace.dialects.answers import arguments_text, content, listed, mapping, number, text, thinking
from millrace.dialects.reading.events import ReplyEvents
from millrace.dialects.reading.pieces import Pieces
from millrace.dialects.rendering.base import Message
from millrace.infra.engines.base import ABORT
from millrace.schemas import bounds
from millrace.schemas.json_values import Json, JsonObject


@dataclass(slots=True)
class CallParts:
    """One tool call while its pieces arrive. `index`: where the server says that it stands among the calls."""

    index: int
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def is_whole(self) -> bool:
        """Whether its arguments came as one object in one piece, so that no piece more could belong to them."""
        if len(self.arguments) != 1 or shape.unwieldy(self.arguments[0]):
            return False
        try:
            return isinstance(orjson.loads(self.arguments[0]), dict)
        except orjson.JSONDecodeError:
            return False


class ChoiceParts:
    """One choice while its pieces arrive."""

    def __init__(self) -> None:
        self.fields = Pieces()
        self.calls: list[CallParts] = []
        """in the order in which they began"""
        self._open: dict[int | None, CallParts] = {}
        """the last call of each index, and of all"""
        self._by_id: dict[tuple[int | None, str], CallParts] = {}
        self.finish: str | None = None

    def take(self, delta: Mapping[str, Json]) -> bool:
        """One more piece; whether all of it could be read."""
        fields = {name: value for name, value in delta.items() if name != "tool_calls"}
        text_or_parts, is_read = delta.get("content"), True
        if not isinstance(text_or_parts, str | None):
            fields["content"] = content(text_or_parts)
            if thoughts := thinking(text_or_parts):
                is_read = self.fields.take({"reasoning_content": thoughts})
        is_read &= self.fields.take(fields)
        if "tool_calls" not in delta:  # as in most
            return is_read
        calls = listed(delta["tool_calls"])
        unread = sum(not self._call(call) for call in calls[: bounds.CALLS])
        return is_read and unread == 0 and len(calls) <= bounds.CALLS

    def _call(self, fields: object) -> bool:
        fields = mapping(fields)
        function = mapping(fields.get("function")) or mapping(fields.get("custom"))
        index = at if isinstance(at := fields.get("index"), int) else None
        id, name = text(fields.get("id")) or "", text(function.get("name")) or ""
        arguments = function.get("arguments", function.get("input"))
        call = self._by_id.get((index, id)) or self._open.get(index)
        if call is None or _begins(call, id, name, arguments, has_index=index is not None):
            if len(self.calls) >= bounds.CALLS:
                return False
            call = CallParts(self.calls[-1].index if index is None and self.calls else index or 0)
            self.calls.append(call)
        self._open[index] = self._open[None] = call
        if id:
            self._by_id[index, id] = call
        call.id, call.name = id or call.id, name or call.name
        if isinstance(arguments, dict | list):  # all of them at once, however often they are said
            call.arguments = [arguments_text(arguments)]
        elif piece := text(arguments):
            call.arguments.append(piece)
        return True

    def message(self) -> Message:
        """The assistant message that the pieces amount to."""
        out: dict[str, Any] = {"content": "", **self.fields.whole(), "role": "assistant"}
        if self.calls:
            out["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for call in sorted(self.calls, key=lambda call: call.index)
            ]
        return out


def _begins(call: CallParts, id: str, name: str, arguments: object, *, has_index: bool) -> bool:
    """Whether a piece of these values begins another call than the last one of its index, or of all where it is not
    `has_index` at an index."""
    if id and id == call.id:
        return False
    if id and not has_index:
        return True
    if id and call.id:
        return bool(name)  # some servers give each piece of a call an id of its own, and none but the first a name
    has_arguments = arguments not in (None, "")
    return bool(name and call.name and has_arguments) and (call.is_whole() or (name != call.name and not has_index))


def usage_of(usage: Mapping[str, Json]) -> JsonObject:
    """Token counts of a response, and no more of what a server says there."""
    details = {"cached_tokens": number(mapping(usage.get("prompt_tokens_details")).get("cached_tokens"))}
    counts = {name: number(usage.get(name)) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {**counts, "prompt_tokens_details": details}


class AssembledStream(ReplyEvents):
    """A whole stream of chunks."""

    def __init__(self) -> None:
        super().__init__()
        self._head: JsonObject = {}
        self._choices: dict[int, ChoiceParts] = {}

    def take(self, event: JsonObject) -> bool:
        self._head |= {name: text(event[name]) for name in ("id", "model") if text(event.get(name))}
        if usage := mapping(event.get("usage")):
            self._head["usage"] = usage_of(usage)
        choices = listed(event.get("choices"))
        is_read = len(choices) <= bounds.CHOICES
        for at, choice in enumerate(choices[: bounds.CHOICES]):
            choice = mapping(choice)
            index = number(choice.get("index"), at)
            parts = self._choices.get(index)
            if parts is None:
                if len(self._choices) >= bounds.CHOICES:
                    return False
                parts = self._choices[index] = ChoiceParts()
            is_read &= parts.take(mapping(choice.get("delta")))
            parts.finish = text(choice.get("finish_reason")) or parts.finish
            self.closing |= parts.finish is not None
        return is_read

    def response(self) -> JsonObject:
        choices: list[JsonObject] = [
            {"index": index, "message": parts.message(), "finish_reason": self.finish or parts.finish}
            for index, parts in sorted(self._choices.items())
        ]
        if not choices and self.finish == ABORT:
            choices = [{"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": ABORT}]
        return {**self._head, "object": "chat.completion", "choices": choices}
