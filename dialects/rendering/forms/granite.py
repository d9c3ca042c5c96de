"""Granite 3: `<|tool_call|>` and then a JSON list to the reply's end. Granite 4 writes Hermes form."""

from __future__ import annotations

from millrace.dialects.rendering.base import ToolCall
from millrace.dialects.rendering.forms.base import Form, Schemas, json_calls


def read(text: str, schemas: Schemas) -> list[ToolCall]:
    """All calls of a reply."""
    return json_calls(text)


GRANITE = Form("granite", read, "<|tool_call|>")
