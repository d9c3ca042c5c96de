"""What a request says to the model's chat template, whatever API it comes by: how hard to think, whether at all, and
what else `chat_template_kwargs` holds.

A switch of thoughts goes by the names that templates have for it. Which of all these a template reads, its renderer
knows; the rest has no effect.

Invariant: a request and its record say the same, so that a session is rebuilt with the options that it was served
with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from millrace.dialects.errors import bad_request
from millrace.schemas import bounds
from millrace.schemas.json_values import Json, JsonObject

SWITCHES = ("enable_thinking", "thinking")
"""names of templates for whether the model thinks"""
GATEWAY_OPTIONS = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "strftime_now"),
        *("raise_exception", "bos_token", "eos_token", "unk_token", "pad_token", "generate", "now"),
    )
)
"""what the gateway itself gives a template"""
FIELDS = ("chat_template_kwargs", "reasoning_effort", "reasoning", "thinking", "output_config")
FIELD_MARKS = tuple(f'"{field}"'.encode() for field in FIELDS)


class _Fields(msgspec.Struct):
    chat_template_kwargs: Any = None
    reasoning_effort: Any = None
    reasoning: Any = None
    thinking: Any = None
    output_config: Any = None


_decoder = msgspec.json.Decoder(_Fields)


def template_options(body: bytes) -> JsonObject:
    """The options by their names in templates. Raises ApiError 400 for one that is the gateway's own to give."""
    if not any(name in body for name in FIELD_MARKS):
        return {}
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    out: JsonObject = {}
    effort = fields.reasoning_effort or _of(fields.reasoning, "effort") or _of(fields.output_config, "effort")
    if isinstance(effort, str) and len(effort) <= bounds.NAME_BYTES:
        out["reasoning_effort"] = effort
        if effort == "none":
            out |= dict.fromkeys(SWITCHES, False)
    match _of(fields.thinking, "type"):
        case "disabled":
            out |= dict.fromkeys(SWITCHES, False)
        case "enabled" | "adaptive":
            out |= dict.fromkeys(SWITCHES, True)
    options = fields.chat_template_kwargs
    for name in options if isinstance(options, Mapping) else ():
        if name in GATEWAY_OPTIONS:
            raise bad_request(
                f"chat_template_kwargs: {name!r} is given by the gateway itself", param="chat_template_kwargs"
            )
    return out | options if isinstance(options, dict) else out


def _of(value: object, name: str) -> Json:
    return value.get(name) if isinstance(value, Mapping) else None
