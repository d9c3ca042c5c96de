"""Mistral: `[TOOL_CALLS]` and then, to the reply's end, a JSON list, or since 2025 a name, `[ARGS]` and JSON for each
call."""

from __future__ import annotations

from millrace.dialects.rendering.base import ToolCall
from millrace.dialects.rendering.forms.base import Form, Schemas, call, json_calls

OPEN, ARGS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def read(text: str, schemas: Schemas) -> list[ToolCall]:
    """All calls of a reply."""
    if text.lstrip().startswith("["):
        return json_calls(text)
    calls = []
    for one in text.split(OPEN):
        name, args, arguments = one.partition(ARGS)
        if not args:
            raise ValueError("a call has arguments")
        calls.append(call(name.partition(ID)[0].strip(), arguments.strip()))
    return calls


MISTRAL = Form("mistral", read, OPEN, think=("[THINK]", "[/THINK]"))
