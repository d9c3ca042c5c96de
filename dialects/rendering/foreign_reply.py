"""A reply that another model gave, as the tokens that this model would have to sample to say it.

    render(messages)            prompt
    told(messages + reply)      prompt + said + end + rest

Invariants: `prompt` is what a gateway gives the engine for these messages, id by id; `said` ends with the one token
that ends a reply, and with nothing behind it; read back by this model's own parser it is the reply that was given.
Where a form keeps to none of that, the reply is refused by name and never written in another way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from millrace.dialects.rendering.base import Message, ParsedReply, PromptTooLong, Renderer, RenderError, Tools

TOO_LONG = "it is longer than the model's context"
UNWRITTEN = "the model's form does not write such messages"
REWRITTEN = "the model's form writes a reply in another way than it asks for one"
ENDLESS = "the model's form does not end the reply with one token of its own"
MISREAD = "written in the model's form, it does not read as what was said"


class Speech(NamedTuple):
    """The ids of a prompt, and of the reply to it, the token that ends it included."""

    prompt: list[int]
    reply: list[int]


class Unspoken(Exception):
    """A reply has no tokens that the model would sample for it; says why."""


def speech_of(renderer: Renderer, messages: Sequence[Message], reply: Message, tools: Tools) -> Speech:
    """The tokens of `reply` to `messages`. Raises Unspoken with one of the reasons above.

    Thoughts that the form does not write are left out; they alone."""
    try:
        prompt = renderer.render(messages, tools)
        conversation = renderer.conversation_ids([*messages, reply], tools)
    except PromptTooLong:
        raise Unspoken(TOO_LONG) from None
    except RenderError:
        raise Unspoken(UNWRITTEN) from None
    if conversation[: len(prompt)] != prompt:
        raise Unspoken(REWRITTEN)
    behind = conversation[len(prompt) :]
    ends = [at for at, id in enumerate(behind) if id in renderer.stop_ids]
    if not ends or _says(renderer, behind[ends[0] :]):
        raise Unspoken(ENDLESS)
    reply_ids = behind[: ends[0] + 1]
    parser = renderer.parser(prompt, tools)
    parser.whole(reply_ids)
    if not _matches(reply, parser.reply):
        raise Unspoken(MISREAD)
    return Speech(prompt, reply_ids)


def _says(renderer: Renderer, ids: Sequence[int]) -> bool:
    """Whether anything is there but tokens that end replies, and white space. What a reply says after such a token of
    its own shows as well when it is read back, as a reply that is too short."""
    return bool("".join(renderer.text(id) for id in ids if id not in renderer.stop_ids).strip())


def _matches(message: Message, read: ParsedReply) -> bool:
    """Whether what was read is what was given. White space at the ends belongs to a form, as does that of arguments."""
    calls = [
        (call["function"]["name"], _value(call["function"]["arguments"])) for call in message.get("tool_calls") or []
    ]
    thoughts = (read.reasoning or "").strip()
    return (
        (read.content or "").strip() == (message.get("content") or "").strip()
        and thoughts in ("", (message.get("reasoning_content") or "").strip())
        and [(call.name, _value(call.arguments)) for call in read.calls] == calls
    )


def _value(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
