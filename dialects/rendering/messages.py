"""Messages as one chat template expects them: arguments of tool calls as objects, unless they nest deeper or hold
more than a template may walk, or as text where the template takes nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from millrace.dialects.rendering.base import Message
from millrace.dialects.shape import unwieldy
from millrace.schemas.json_values import JsonObject

ID_CHARS = 9
"""characters of the ids that Mistral's templates take, letters and digits"""


class Style(NamedTuple):
    """`text`: arguments stay text. `short`: ids of calls are made `ID_CHARS`. `thoughts`: by what name thoughts go.
    `joined`: what is said beside calls goes with the thoughts, since the template takes one of both."""

    text: bool = False
    short: bool = False
    thoughts: str = "reasoning_content"
    joined: bool = False


DEFAULT_STYLE = Style()


def to_template(messages: Sequence[Message], style: Style = DEFAULT_STYLE) -> list[JsonObject]:
    """The messages in a style; arguments that are no JSON, or too deep or too much, stay text in any."""
    return [_apply_style(message, style) for message in messages]


def _apply_style(message: Message, style: Style) -> JsonObject:
    out = dict(message)
    if message.get("tool_calls"):
        out["tool_calls"] = [_call(call, style) for call in message["tool_calls"]]
    if style.short and message.get("tool_call_id"):
        out["tool_call_id"] = _shorten_id(message["tool_call_id"])
    if thoughts := message.get("reasoning_content"):
        del out["reasoning_content"]
        if style.joined and message.get("tool_calls") and message.get("content"):
            thoughts, out["content"] = f"{thoughts}\n\n{message['content']}", ""
        out[style.thoughts] = thoughts
    return out


def _call(call: Message, style: Style) -> JsonObject:
    function = call["function"]
    arguments = function["arguments"]
    if not style.text and not unwieldy(arguments):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = function["arguments"]
    out = {**call, "function": {**function, "arguments": arguments}}
    if style.short and call.get("id"):
        out["id"] = _shorten_id(call["id"])
    return out


def _shorten_id(id: str) -> str:
    """The id, if it is short already, else one that stands for it."""
    if len(id) == ID_CHARS and id.isascii() and id.isalnum():
        return id
    return blake2b(id.encode(errors="surrogatepass"), digest_size=8).hexdigest()[:ID_CHARS]
