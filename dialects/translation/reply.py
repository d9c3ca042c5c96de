"""A reply that an upstream of another API gives, as the client's dialect writes it: a `WritableCall` of one choice."""

from __future__ import annotations

import os
from typing import Any

from millrace.dialects.conversation import Ask, ModelRefusal, Part, Text, Thinking, ToolUse
from millrace.dialects.translation.base import ReplyFacts
from millrace.infra.engines.base import ABORT
from millrace.schemas.ids import now_micros
from millrace.schemas.json_values import JsonObject

REASONS = ("stop", "length", "tool_calls", "content_filter")
"""reasons of an end that every API has a word for"""
ENDS = {"refusal": "content_filter", "model_context_window_exceeded": "length", "pause_turn": "length"}
"""one of them for others, by the name of these"""


class TranslatedChoice:
    """The one reply, as far as it was heard. It has no tokens: an upstream gives text."""

    index = 0

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[list[tuple[int, float]]] = []
        self.calls: list[dict[str, Any]] = []
        self.finish: str | None = None
        self.stop: str | None = None
        self._texts: list[str] = []
        self._thoughts: list[str] = []

    def say(self, parts: list[Part]) -> list[Part]:
        """Take what was heard; calls of tools come back with an id, where the upstream gave none."""
        out: list[Part] = []
        for part in parts:
            match part:
                case Text() | ModelRefusal():
                    self._texts.append(part.text)
                case Thinking():
                    self._thoughts.append(part.text)
                case ToolUse():
                    part = part if part.id else ToolUse(f"call_{os.urandom(12).hex()}", part.name, part.arguments)
                    function = {"name": part.name, "arguments": part.arguments}
                    self.calls.append({"id": part.id, "type": "function", "function": function})
            out.append(part)
        return out

    @property
    def content(self) -> str:
        """Its text."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        """Its thoughts."""
        return "".join(self._thoughts)

    @property
    def reason(self) -> str:
        """OpenAI's finish reason; abort for a reply that did not come to its end."""
        if self.finish == "stop" and self.calls:
            return "tool_calls"
        return self.finish or ABORT

    def parts(self) -> list[Part]:
        """The whole reply."""
        out: list[Part] = []
        if self._thoughts:
            out.append(Thinking(self.reasoning))
        if self._texts:
            out.append(Text(self.content))
        uses = [(call["id"], call["function"]) for call in self.calls]
        return [*out, *(ToolUse(id, function["name"], function["arguments"]) for id, function in uses)]

    def message(self) -> JsonObject:
        """The assistant message of chat completions."""
        out: JsonObject = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self._thoughts:
            out["reasoning_content"] = self.reasoning
        if self.calls:
            out["tool_calls"] = self.calls
        return out


class TranslatedCall:
    """A request and its one reply. `facts`: what the upstream says of it."""

    is_shortened = False
    keeps = True

    def __init__(self, request: Ask, prefix: str, facts: ReplyFacts) -> None:
        self.request = request
        self.when = now_micros()
        self.choice = TranslatedChoice()
        self.choices = [self.choice]
        self._prefix = prefix
        self._told = facts
        self._id = ""

    @property
    def response_id(self) -> str:
        """The upstream's own id of it behind the prefix of the client's API: who looks for it there finds it. It is the
        same from the first time on that somebody asks."""
        if not self._id:
            self._id = self._prefix + (self._told.id or os.urandom(12).hex())
        return self._id

    @property
    def temperature(self) -> float:
        """At which it is sampled, as far as it was asked."""
        return 1.0 if self.request.temperature is None else self.request.temperature

    @property
    def top_p(self) -> float:
        """With which it is sampled, as far as it was asked."""
        return 1.0 if self.request.top_p is None else self.request.top_p

    @property
    def prompt_tokens(self) -> int:
        """As the upstream counts."""
        return self._told.usage[0]

    @property
    def completion_tokens(self) -> int:
        """As the upstream counts."""
        return self._told.usage[1]

    @property
    def cached(self) -> int:
        """As the upstream counts."""
        return self._told.usage[2]

    def end(self) -> None:
        """The reply is at its end."""
        finish = self._told.finish or "stop"
        finish = ENDS.get(finish, finish)
        self.choice.finish, self.choice.stop = finish if finish in REASONS else "stop", self._told.stop

    def token(self, id: int) -> str:
        """There are none."""
        raise AssertionError(f"a reply of text has no token {id}")

    def token_bytes(self, id: int) -> bytes:
        """There are none."""
        raise AssertionError(f"a reply of text has no token {id}")
