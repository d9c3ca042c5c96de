"""A streamed chat completion put together again, while its bytes go on to the client untouched.

Invariant: memory is bounded by the bounds on choices and tool calls too, whatever indexes the server writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.dialects.answers import content, listed, mapping, number, text, thinking
from millrace.dialects.reading.events import ReplyEvents
from millrace.dialects.reading.pieces import Pieces
from millrace.infra.engines.base import ABORT
from millrace.schemas import bounds


class ChoiceParts:
    """One choice while its pieces arrive."""

    def __init__(self) -> None:
        self.fields = Pieces()
        self.calls: dict[int, dict[str, Any]] = {}
        self.last = 0
        """the highest index of a call"""
        self.finish: str | None = None

    def take(self, delta: Mapping[str, Any]) -> bool:
        """One more piece; whether all of it could be read."""
        said = {name: value for name, value in delta.items() if name != "tool_calls"}
        given, good = delta.get("content"), True
        if not isinstance(given, str | None):
            said["content"] = content(given)
            if thoughts := thinking(given):
                good = self.fields.take({"reasoning_content": thoughts})
        good &= self.fields.take(said)
        if "tool_calls" not in delta:  # as in most
            return good
        calls = listed(delta["tool_calls"])
        unread = sum(not self._call(call) for call in calls[: bounds.CALLS])
        return good and unread == 0 and len(calls) <= bounds.CALLS

    def _call(self, given: Any) -> bool:
        given = mapping(given)
        function = mapping(given.get("function")) or mapping(given.get("custom"))
        at = given.get("index")
        if not isinstance(at, int):  # without an index an id begins a call, and what has none goes on with the last
            at = len(self.calls) if text(given.get("id")) or not self.calls else self.last
        call = self.calls.get(at)
        if call is None:
            if len(self.calls) >= bounds.CALLS:
                return False
            call = self.calls[at] = {"id": "", "name": "", "arguments": []}
            self.last = at if len(self.calls) == 1 else max(self.last, at)
        call["id"] = text(given.get("id")) or call["id"]
        call["name"] = text(function.get("name")) or call["name"]
        if piece := text(function.get("arguments")) or text(function.get("input")):
            call["arguments"].append(piece)
        return True

    def message(self) -> dict[str, Any]:
        """The assistant message that the pieces amount to."""
        out: dict[str, Any] = {"content": "", **self.fields.whole(), "role": "assistant"}
        if self.calls:
            out["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(call["arguments"])},
                }
                for _, call in sorted(self.calls.items())
            ]
        return out


def usage_of(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Token counts of a response, and no more of what a server says there."""
    details = {"cached_tokens": number(mapping(usage.get("prompt_tokens_details")).get("cached_tokens"))}
    counts = {name: number(usage.get(name)) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {**counts, "prompt_tokens_details": details}


class AssembledStream(ReplyEvents):
    """A whole stream of chunks."""

    def __init__(self) -> None:
        super().__init__()
        self._head: dict[str, Any] = {}
        self._choices: dict[int, ChoiceParts] = {}

    def take(self, event: dict[str, Any]) -> bool:
        self._head |= {name: text(event[name]) for name in ("id", "model") if text(event.get(name))}
        if usage := mapping(event.get("usage")):
            self._head["usage"] = usage_of(usage)
        choices = listed(event.get("choices"))
        good = len(choices) <= bounds.CHOICES
        for at, choice in enumerate(choices[: bounds.CHOICES]):
            choice = mapping(choice)
            index = number(choice.get("index"), at)
            parts = self._choices.get(index)
            if parts is None:
                if len(self._choices) >= bounds.CHOICES:
                    return False
                parts = self._choices[index] = ChoiceParts()
            good &= parts.take(mapping(choice.get("delta")))
            parts.finish = text(choice.get("finish_reason")) or parts.finish
            self.closing |= parts.finish is not None
        return good

    def response(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = [
            {"index": index, "message": parts.message(), "finish_reason": self.finish or parts.finish}
            for index, parts in sorted(self._choices.items())
        ]
        if not choices and self.finish == ABORT:
            choices = [{"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": ABORT}]
        return {**self._head, "object": "chat.completion", "choices": choices}
