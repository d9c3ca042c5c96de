"""How a judge is asked in each API: chat completions, Anthropic's Messages, OpenAI's Responses.

Invariants: whatever the API, a judge reads the same instructions and the same case; a reply in none of the API's forms
raises ValueError and nothing else, and what it counted is told all the same. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import orjson

from millrace.schemas.json_values import JsonObject

T = TypeVar("T")

Usage = tuple[object, object]
"""tokens of the prompt and of the reply, as an API counted them: None, or anything, where it did not"""
ANTHROPIC = {"anthropic-version": "2023-06-01"}


class JudgeReply(NamedTuple):
    """What a judge answered: its text, None where there is none, and its count of tokens."""

    text: str | None
    usage: Usage


class JudgeApi(NamedTuple):
    """One API: where it is asked, with which headers, in which form; `read` takes the fields of an answer. Raises
    LookupError, TypeError or AttributeError for what is none."""

    path: str
    headers: Mapping[str, str]
    body: Callable[[str, str, str, int], JsonObject]
    """of a model, its instructions, the case, and the longest reply in tokens"""
    text: Callable[[dict[str, Any]], str | None]
    usage: Callable[[dict[str, Any]], Usage]

    def request(self, model: str, instructions: str, case: str, longest: int) -> bytes:
        """The body of a request."""
        return json.dumps(self.body(model, instructions, case, longest)).encode()

    def read(self, body: bytes) -> JudgeReply:
        """What an answer says. Raises ValueError for what is no JSON object."""
        answer = orjson.loads(body)
        if not isinstance(answer, dict):
            raise ValueError("no object")
        return JudgeReply(_or_none(self.text, answer), _or_none(self.usage, answer) or (None, None))


def _or_none(read: Callable[[dict[str, Any]], T], answer: dict[str, Any]) -> T | None:
    try:
        return read(answer)
    except (LookupError, TypeError, AttributeError):
        return None


def _chat(model: str, instructions: str, case: str, longest: int) -> JsonObject:
    messages = [{"role": "system", "content": instructions}, {"role": "user", "content": case}]
    return {"model": model, "temperature": 0, "max_tokens": longest, "messages": messages}


def _messages(model: str, instructions: str, case: str, longest: int) -> JsonObject:
    messages = [{"role": "user", "content": case}]
    return {"model": model, "temperature": 0, "max_tokens": longest, "system": instructions, "messages": messages}


def _responses(model: str, instructions: str, case: str, longest: int) -> JsonObject:
    asked = [{"role": "user", "content": case}]
    content: JsonObject = {"instructions": instructions, "input": asked, "store": False}
    return {"model": model, "temperature": 0, "max_output_tokens": longest, **content}


def _chat_text(answer: dict[str, Any]) -> str | None:
    text: str | None = answer["choices"][0]["message"]["content"]
    return text


def _messages_text(answer: dict[str, Any]) -> str:
    return "".join(part["text"] for part in answer["content"] if part["type"] == "text")


def _responses_text(answer: dict[str, Any]) -> str:
    return "".join(part["text"] for part in _parts(answer) if part["type"] == "output_text")


def _parts(answer: dict[str, Any]) -> Iterator[Any]:
    for item in answer["output"]:
        if item["type"] == "message":
            yield from item["content"]


def _chat_usage(answer: dict[str, Any]) -> Usage:
    usage = answer["usage"]
    return usage.get("prompt_tokens"), usage.get("completion_tokens")


def _messages_usage(answer: dict[str, Any]) -> Usage:
    """Tokens that were read from a cache, or written to one, are of the prompt too."""
    usage = answer["usage"]
    cache_tokens = [usage.get(f"cache_{kind}_input_tokens") or 0 for kind in ("read", "creation")]
    return usage["input_tokens"] + sum(cache_tokens), usage.get("output_tokens")


def _responses_usage(answer: dict[str, Any]) -> Usage:
    usage = answer["usage"]
    return usage.get("input_tokens"), usage.get("output_tokens")


APIS: Mapping[str, JudgeApi] = {
    "chat": JudgeApi("/chat/completions", {}, _chat, _chat_text, _chat_usage),
    "messages": JudgeApi("/messages", ANTHROPIC, _messages, _messages_text, _messages_usage),
    "responses": JudgeApi("/responses", {}, _responses, _responses_text, _responses_usage),
}
"""by the name that upstreams of the gateway have for them"""
