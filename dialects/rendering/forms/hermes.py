"""Hermes, Qwen 2.5 and 3, Granite 4: JSON between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

import json
import re

from millrace.dialects.rendering.base import ToolCall
from millrace.dialects.rendering.forms.base import ArgumentsDraft, Form, Schemas, named

CALL_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')


def read(text: str, schemas: Schemas) -> list[ToolCall]:
    """One call."""
    text = text.strip()
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("a call is an object")
    if (call := sampled_call(text)) is not None:
        return [call]
    return [named(value.get("name"), arguments_of(text, value.get("arguments", {})))]


def sampled_call(text: str) -> ToolCall | None:
    """The call of a JSON text as it is told while it is sampled; None for one that is told when it is whole."""
    draft = ArgumentsDraft(CALL_HEAD)
    arguments = draft.add(text)
    return named(draft.name, arguments) if draft.is_whole else None


def arguments_of(text: str, arguments: object) -> str:
    """The arguments of a call as JSON text: exactly as sampled where they end its `text`, else written anew."""
    if isinstance(arguments, str):
        return arguments
    at = text.find('"arguments"')
    end = text[at + len('"arguments"') :].lstrip().removeprefix(":").strip()
    if at >= 0 and end.endswith("}"):
        end = end[:-1].rstrip()
        try:
            if json.loads(end) == arguments:
                return end
        except (ValueError, RecursionError):
            pass
    return json.dumps(arguments, ensure_ascii=False)


HERMES = Form("hermes", read, "<tool_call>", "</tool_call>", named=CALL_HEAD)
