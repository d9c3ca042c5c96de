"""Phi-4-mini: a JSON list between `<|tool_call|>` and `<|/tool_call|>`."""

from __future__ import annotations

from millrace.dialects.rendering.base import ToolCall
from millrace.dialects.rendering.forms.base import Form, Schemas, json_calls


def read(text: str, schemas: Schemas) -> list[ToolCall]:
    """All calls of a reply."""
    return json_calls(text)


PHI = Form("phi", read, "<|tool_call|>", "<|/tool_call|>")
