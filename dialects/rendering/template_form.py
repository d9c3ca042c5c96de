"""What a model's own template tells of itself: one call of a tool and one thought are written with it, and read back.

Invariants: a form of calls is the model's only if it reads the call that the template writes as that very call; what
is found depends on the template and the tokenizer alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

from millrace.dialects.rendering.base import Message, RenderError, Tools
from millrace.dialects.rendering.forms.all import FORMS, writable
from millrace.dialects.rendering.forms.base import Form
from millrace.dialects.rendering.forms.harmony import HARMONY
from millrace.dialects.rendering.messages import Style
from millrace.dialects.rendering.parsers.choose import parser_of
from millrace.dialects.rendering.parsers.marker_parser import Markers
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.schemas.json_values import JsonObject

NAME, WORD = "zq7_find", "zq7 word"
ARGUMENTS: JsonObject = {"city": WORD, "days": 3, "exact": True, "parts": ["a", 2], "limits": {"most": 0.5}}
TYPES = {"city": "string", "days": "integer", "exact": "boolean", "parts": "array", "limits": "object"}
TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "Find.",
            "parameters": {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}},
        },
    }
]
USER: Message = {"role": "user", "content": "a"}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call_zq7", "type": "function", "function": {"name": NAME, "arguments": json.dumps(ARGUMENTS)}}
    ],
}
RESULT: Message = {"role": "tool", "tool_call_id": "call_zq7", "name": NAME, "content": "b"}
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""names under which templates look for thoughts"""

Write = Callable[[list[Message], Tools, bool, Style], str]
"""messages, tools, whether a reply is asked for, and in which style the messages are given; raises RenderError"""


class Manner(NamedTuple):
    """How messages are given to the template; the form of its calls, or why there is none."""

    style: Style
    form: Form | None
    why: str = ""


def manner_of(tokenizer: ChatTokenizer, write: Write) -> Manner:
    """What `write`, which is the template, tells."""
    thoughts, fallback = _thoughts(write), None
    for text, has_short_ids in product((False, True), (False, True)):
        style = Style(text, has_short_ids, thoughts)
        try:
            write([USER, CALL, RESULT], TOOLS, True, style)
            prompt = tokenizer.encode(write([USER], TOOLS, True, style))
            reply = _behind(prompt, tokenizer.encode(write([USER, CALL], TOOLS, False, style)))
        except RenderError:
            continue
        fallback = fallback or style
        form = next((form for form in FORMS if writable(form, tokenizer) and _reads(form, tokenizer, reply)), None)
        if form is not None:
            style = style._replace(joined=not _takes(write, {**CALL, "content": "b", "reasoning_content": "c"}, style))
            is_shown = NAME in tokenizer.decode(prompt)
            return Manner(style, form, "" if is_shown else "its chat template does not show them to the model")
    names = ", ".join(form.name for form in FORMS)
    channels = (
        HARMONY if writable(HARMONY, tokenizer) else None
    )  # to whatever calls it is trained, it speaks in channels
    return Manner(
        fallback or Style(thoughts=thoughts),
        channels,
        f"its chat template writes no call in a form that this gateway reads ({names}); set [gateway] renderer to its "
        "family, or give the model a chat_template.jinja that writes tool_calls in such a form",
    )


def _takes(write: Write, reply: Message, style: Style) -> bool:
    try:
        write([USER, reply, RESULT], TOOLS, True, style)
    except RenderError:
        return False
    return True


def _thoughts(write: Write) -> str:
    """The name under which the template looks for thoughts."""
    for name in THOUGHTS:
        message: Message = {"role": "assistant", "content": "b", "reasoning_content": WORD}
        try:
            if WORD in write([USER, message], None, False, Style(thoughts=name)):
                return name
        except RenderError:
            continue
    return THOUGHTS[0]


def _behind(prompt: list[int], conversation: list[int]) -> list[int]:
    """What a conversation has behind the prompt, or behind what it has in common with it."""
    fork = next(
        (at for at, (first, second) in enumerate(zip(prompt, conversation, strict=False)) if first != second), None
    )
    return conversation[min(len(prompt), len(conversation)) if fork is None else fork :]


def _reads(form: Form, tokenizer: ChatTokenizer, reply: list[int]) -> bool:
    """Whether a form reads a reply as the call that was written. What comes behind its end does not count."""
    parser = parser_of(tokenizer, Markers(tokenizer, form), [], TOOLS, (), tokenizer.stop_ids)
    parser.whole(reply)
    return [(call.name, _object(call.arguments)) for call in parser.reply.calls] == [(NAME, ARGUMENTS)]


def _object(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
