"""DeepSeek: V3 and R1 with `function`, the name and fenced JSON, V3.1 with the name and plain JSON."""

from __future__ import annotations

import re

from millrace.dialects.rendering.base import ToolCall
from millrace.dialects.rendering.forms.base import Form, Schemas, call

# Atomic groups: a reply that repeats a mark without end is read in time that grows with its length alone.
CALL = re.compile(r"\s*<｜tool▁call▁begin｜>(?>(.*?)<｜tool▁sep｜>)(?>(.*?)<｜tool▁call▁end｜>)", re.DOTALL)
CALL_HEAD = re.compile(r"\s*<｜tool▁call▁begin｜>\s*([^<\s]+)\s*<｜tool▁sep｜>\s*(?=\{)")
FENCE = re.compile(r"([^\n]+)\n```json\n(.*)\n```\s*", re.DOTALL)


def read(text: str, schemas: Schemas) -> list[ToolCall]:
    """All calls of a reply."""
    calls, at = [], 0
    while match := CALL.match(text, at):
        head, rest = match.groups()
        fence = FENCE.fullmatch(rest) if head.strip() == "function" else None
        name, arguments = fence.groups() if fence else (head, rest)
        calls.append(call(name.strip(), arguments.strip()))
        at = match.end()
    if text[at:].strip() or not calls:
        raise ValueError("a block holds calls alone")
    return calls


DEEPSEEK = Form(
    "deepseek",
    read,
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    tokens=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    named=CALL_HEAD,
)
