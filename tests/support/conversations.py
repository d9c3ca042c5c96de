"""A whole world (`tests.support.history`) whose calls are chats: system and user messages, a tool in between, replies.
Their records leave out what earlier ones said, as a gateway's do.

Texts are chosen by the world's own chance out of `texts`, so hostile ones can be put in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from millrace.infra.log.base import Record
from millrace.producers.gateway.sessions.request_trail import RequestTrail
from millrace.schemas.requests import outline_request
from tests.support.history import History
from tests.support.history_records import model_call

LOOK = {"name": "look", "description": "Look out of the window. " * 30, "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": LOOK}]
PLAIN = ("What is the weather?", "It rains.", "Look again, please.", "Ça va: 20 °C", "a < b & c")


class Conversations(History):
    """The same world, with texts."""

    def __init__(self, seed: int = 0, versions: int = 6, texts: Sequence[str] = PLAIN) -> None:
        self.texts = texts
        self.said: dict[str, list[dict[str, Any]]] = {}
        self.trails: dict[str, RequestTrail] = {}
        super().__init__(seed, versions)

    def call(
        self,
        episode: Mapping[str, Any],
        lineage: str,
        response: str,
        turn: int,
        kept: int,
        prompt: list[int],
        output: list[int],
        supersedes: str | None,
        withheld: bool,
    ) -> None:
        first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Do {episode['task']}."}]
        messages = self.said.setdefault(episode["trajectory"], first)
        if supersedes:  # the same is asked again
            del messages[-2 if messages[-1]["role"] == "tool" else -1 :]
        reply: dict[str, Any] = {
            "role": "assistant",
            "content": f"{self.rng.choice(self.texts)} ({episode['trajectory']})",
        }
        tool = self.id("tool") if turn == 1 else None
        if tool:
            arguments = orjson.dumps({"where": self.rng.choice(self.texts)}).decode()
            function = {"name": "look", "arguments": arguments}
            reply["tool_calls"] = [{"id": tool, "type": "function", "function": function}]
        low = episode["grant"]["min_version"] if episode["grant"] else self.version
        versions = sorted(self.rng.randint(low, self.version) for _ in output)
        logprobs = [-self.rng.random() for _ in output]
        body = model_call(self.id("call"), response, lineage, turn, kept, prompt, output, logprobs, versions)
        asked = orjson.dumps({"messages": messages, "tools": TOOLS})
        trail, outline = self.trails.setdefault(episode["trajectory"], RequestTrail()), outline_request(asked)
        stored = trail.compress(asked, outline)
        body |= {"request": stored.request, "request_base": stored.base, "request_kept": stored.overlap}
        body["supersedes"] = supersedes
        body["response"] = orjson.dumps({"choices": [{"index": 0, "message": reply}]})
        if withheld:
            body |= {"trainable": False, "untrainable_reason": "redacted"}
        event = self.speak(episode, "model_call", body)
        if not withheld:  # refine would withhold what goes on from it
            trail.add(event, outline)
        messages.append(reply)
        if tool:
            asked_for = {"call_id": tool, "name": "look", "arguments": arguments, "response_id": response}
            answer = self.rng.choice(self.texts)
            self.speak(episode, "tool_call", asked_for)
            done = {"call_id": tool, "name": "look", "status": "ok", "content": answer, "tool_version": None}
            self.speak(episode, "tool_result", {**done, "latency_us": 7, "side_effect": "none"})
            messages.append({"role": "tool", "tool_call_id": tool, "content": answer})

    def calls(self, sample: Mapping[str, Any]) -> list[tuple[Record, dict[str, Any]]]:
        """The governed model calls of a sealed sample, as they are stored."""
        return [
            (record, event)
            for record, event in self.rows("events")
            if event["kind"] == "model_call" and event["trajectory"] == sample["id"]
        ]

    def govern(self, record: Record, event: Mapping[str, Any], **fields: Any) -> None:
        """Let an event be governed otherwise."""
        self.rewrite(record, {**event, "governance": {**event["governance"], **fields}})
