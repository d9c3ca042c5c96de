"""What a chat completion says, whoever wrote it: OpenAI's answers and the shapes that other servers give them.

Invariants: nothing here raises; a part that has another type than it should is left out, never guessed; no two choices
have one number; what is read fits a ModelCall."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from millrace.dialects import match_keys
from millrace.dialects.rendering.base import Message
from millrace.schemas import bounds
from millrace.schemas.ids import new_id
from millrace.schemas.json_values import Json, JsonObject

TEXT = ("text", "input_text", "output_text")
THOUGHTS = ("reasoning_content", "reasoning")
"""names of a message's thoughts"""


class AnswerChoice(NamedTuple):
    """One choice: its number, what it says, and why it ended."""

    choice: int
    message: Message
    finish: str | None


class WholeAnswer(NamedTuple):
    """A whole response: its id, its choices, and its tokens as the server counted them (prompt, completion, cached)."""

    id: str
    choices: list[AnswerChoice]
    usage: tuple[int, int, int]


def answer_in(response: Mapping[str, Json]) -> WholeAnswer:
    """The answer in a response's fields."""
    choices = [choice for choice in listed(response.get("choices")) if isinstance(choice, dict)][: bounds.CHOICES]
    answers = [
        AnswerChoice(at, reply(mapping(choice.get("message"))), name(choice.get("finish_reason")))
        for at, choice in zip(numbers(choices), choices, strict=True)
    ]
    return WholeAnswer(name(response.get("id")) or new_id(), answers, counts(response))


def counts(response: Mapping[str, Json]) -> tuple[int, int, int]:
    """Tokens as a server counted them in a response: prompt, completion, cached."""
    usage = mapping(response.get("usage"))
    cached_tokens = mapping(usage.get("prompt_tokens_details")).get("cached_tokens")
    return number(usage.get("prompt_tokens")), number(usage.get("completion_tokens")), number(cached_tokens)


def error_in(response: Mapping[str, Json]) -> str:
    """What a server's error says, in its words; "" for what is none in a known shape."""
    error = response.get("error")
    return text(error) or text(mapping(error).get("message")) or text(response.get("message")) or ""


def numbers(choices: Sequence[Mapping[str, Json]]) -> list[int]:
    """The number of each choice: its index, or the next that none before it has, from its place on."""
    out: dict[int, None] = {}
    for place, choice in enumerate(choices):
        at = number(choice.get("index"), place)
        if at in out:
            at = next(candidate for candidate in range(place, 2 * len(choices) + 1) if candidate not in out)
        out[at] = None
    return list(out)


def reply(message: Mapping[str, Json]) -> Message:
    """An assistant's message as match keys and lineages want it: its text, with what it says to refuse; its thoughts,
    by whatever name; its tool calls."""
    words = content(message.get("content")) + (text(message.get("refusal")) or "")
    out: JsonObject = {"role": "assistant", "content": words}
    entries = listed(message.get("tool_calls")) or [{"function": message.get("function_call")}]
    calls = [tool_call for one in entries if (tool_call := call(one)) is not None]
    if calls:
        out["tool_calls"] = calls[: bounds.CALLS]
    if thoughts := thoughts_of(message):
        out["reasoning_content"] = thoughts
    return out


def thoughts_of(message: Mapping[str, Json]) -> str:
    """What a message thinks, under one of the names that servers give it, or among its parts."""
    values = (value for name in THOUGHTS if (value := text(message.get(name))))
    return next(values, None) or thinking(message.get("content"))


def thinking(value: object) -> str:
    """The thoughts among the parts of a message."""
    parts = [mapping(part) for part in listed(value)]
    return "".join(content(part.get("thinking")) for part in parts if part.get("type") == "thinking")


def content(value: object) -> str:
    """The text of a message: a string, or the text parts of a list."""
    parts = [mapping(part) for part in listed(value)]
    return text(value) or "".join(text(part.get("text")) or "" for part in parts if part.get("type", "text") in TEXT)


def call(value: object) -> JsonObject | None:
    """A tool call; a custom one with its input as arguments. None for what is none."""
    value = mapping(value)
    function = mapping(value.get("function")) or mapping(value.get("custom"))
    if not function:
        return None
    arguments = arguments_text(function.get("arguments", function.get("input")))
    fields = {"name": text(function.get("name")) or "", "arguments": arguments}
    return {"id": text(value.get("id")) or "", "type": "function", "function": fields}


def arguments_text(arguments: object) -> str:
    """The arguments of a call as JSON text, also where a server writes them as the object itself."""
    if isinstance(arguments, str):
        return arguments
    return "" if arguments is None else match_keys.canonical(arguments).decode(errors="replace")


def text(value: object) -> str | None:
    """A string that is one."""
    return value if isinstance(value, str) and value else None


def name(value: object) -> str | None:
    """A string that is one, within the bounds of a name."""
    string = text(value)
    return string if string and len(string.encode(errors="surrogatepass")) <= bounds.NAME_BYTES else None


def number(value: object, otherwise: int = 0) -> int:
    """A count or an index within the bounds."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= bounds.INT:
        return value
    return otherwise


def mapping(value: object) -> Mapping[str, Json]:
    """A map that is one, else an empty one."""
    return value if isinstance(value, dict) else {}


def listed(value: object) -> list[Json]:
    """A list that is one, else an empty one."""
    return value if isinstance(value, list) else []


def bytes_in(value: object) -> int:
    """Bytes of all the text in a JSON value, as UTF-8, but for the names in its maps and for log-probabilities."""
    size, rest = 0, [value]
    while rest:
        match rest.pop():
            case str() as text:
                size += len(text.encode(errors="surrogatepass"))
            case dict() as fields:
                rest += [member for name, member in fields.items() if name != "logprobs"]
            case list() as items:
                rest += items
    return size
