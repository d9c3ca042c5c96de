"""The same random traffic by clients of Anthropic's Messages, mixed with chat completions in the same sessions."""

from __future__ import annotations

from typing import Any

import orjson

from millrace.dialects.messages.dialect import Messages
from tests.fuzz.gateway_fuzz import NAMES, TEXTS, Traffic
from tests.support.in_process import Answer

PATH = Messages.path
LABELLED: dict[str, Any] = {
    "tool_choice": {"type": "any"},
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
}
"""what holds a reply, which then never trains"""
UNSERVED: dict[str, Any] = {
    "mcp_servers": [{"name": "x"}],
    "container": "c",
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
}
"""what is refused, since it would change nothing"""
CACHED = {"cache_control": {"type": "ephemeral"}}


class MessagesTraffic(Traffic):
    """Half of its calls are messages."""

    def _asked(self) -> tuple[str, Any, str]:
        r = self.random
        kind = r.random()
        if kind < 0.45:
            return PATH, self._message(), "POST"
        if kind < 0.5:
            given = {name: part for name, part in self._message().items() if name not in ("max_tokens", "stream")}
            return f"{PATH}/count_tokens", given, "POST"
        if kind < 0.52:
            return r.choice((PATH, f"{PATH}/batches", f"{PATH}/count_tokens")), {}, r.choice(("GET", "PUT", "FOO"))
        return super()._asked()

    def _message(self) -> dict[str, Any]:
        r = self.random
        talk = r.choice(self.messaged) if self.messaged and r.random() < 0.5 else []
        text = {"type": "text", "text": r.choice(TEXTS), **(CACHED if r.random() < 0.3 else {})}
        content: Any = r.choice((text["text"], [text], [text, text]))
        given: dict[str, Any] = {"model": "m", "max_tokens": 1000, "messages": [*talk]}
        if r.random() < 0.3:
            given["messages"] += [{"role": "user", "content": "hi"}, {"role": "assistant", "content": self._blocks()}]
            answers = [
                {"type": "tool_result", "tool_use_id": r.choice(("c", *NAMES)), "content": r.choice(("7", [text]))}
            ]
            content = [*answers, text]
        given["messages"] += [{"role": "user", "content": content}]
        if r.random() < 0.5:
            given["tools"] = [{"name": "f", "input_schema": self._free({"type": "object"}), **r.choice(({}, CACHED))}]
        if r.random() < 0.3:
            given["stream"] = True
        options: dict[str, Any] = {
            "system": r.choice(("s", [text], [])), "temperature": 1.0, "top_p": 1.0, "top_k": 0,
            "stop_sequences": ["zz"], "thinking": {"type": "enabled", "budget_tokens": 1024},
            "metadata": {"user_id": r.choice(("ann", '{"session_id": "s1"}', "{", '{"session_id": 7}'))},
            "tool_choice": {"type": r.choice(("auto", "none"))}, "service_tier": "auto",
        }  # fmt: skip
        for name in r.sample(list(options), r.randrange(4)):
            given[name] = options[name]
        if r.random() < 0.05:
            odd = {**UNSERVED, **LABELLED}
            name = r.choice(list(odd))
            given[name] = odd[name]
        return given

    def _blocks(self) -> list[dict[str, Any]]:
        """A reply with a call, its thoughts kept or not."""
        r = self.random
        thought = {"type": "thinking", "thinking": "so", "signature": "x"}
        call = {"type": "tool_use", "id": "c", "name": "f", "input": self._free({"a": 1, "b": {"c": [2.5, "x"]}})}
        redacted = {"type": "redacted_thinking", "data": "x"}
        return [*r.choice(([], [thought], [redacted])), {"type": "text", "text": r.choice(TEXTS)}, call]

    @property
    def messaged(self) -> list[list[Any]]:
        """Conversations that may be gone on with."""
        self._messaged: list[list[Any]] = getattr(self, "_messaged", [])
        return self._messaged

    def _learn(self, path: str, given: Any, answer: Answer) -> None:
        if path != PATH:
            return super()._learn(path, given, answer)
        if answer.status == 200 and answer.body.startswith(b"{") and len(given.get("messages", ())) in range(1, 20):
            found = orjson.loads(answer.body)
            self.responses = [*self.responses[-20:], found["id"]]
            calls = [block["id"] for block in found["content"] if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": id, "content": "7"} for id in calls]
            tail = [{"role": "user", "content": results}] if results else []
            reply = {"role": "assistant", "content": found["content"]}
            self._messaged = [*self.messaged[-20:], [*given["messages"], reply, *tail]]
        return None
