"""GLM 4.5 and later: the name, then `<arg_key>` and `<arg_value>` for each argument, between the tokens of Hermes
form."""

from __future__ import annotations

import re

from millrace.dialects.rendering.base import ToolCall
from millrace.dialects.rendering.forms.base import Form, Schemas, call, typed, written

# Atomic groups: a reply that repeats a mark without end is read in time that grows with its length alone.
ARGUMENT = re.compile(r"\s*<arg_key>(?>(.*?)</arg_key>)\s*<arg_value>(?>(.*?)</arg_value>)", re.DOTALL)


def read(text: str, schemas: Schemas) -> list[ToolCall]:
    """One call."""
    at = text.find("<arg_key>")
    name, body = (text, "") if at < 0 else (text[:at], text[at:])
    name = name.strip()
    if any(sign in name for sign in "<{\n"):
        raise ValueError("a call begins with a name")
    known, arguments, at = schemas.get(name, {}), {}, 0
    while found := ARGUMENT.match(body, at):
        key = found.group(1).strip()
        arguments[key] = typed(found.group(2), known.get(key))
        at = found.end()
    if body[at:].strip():
        raise ValueError("a call has arguments alone")
    return [call(name, written(arguments))]


GLM = Form("glm", read, "<tool_call>", "</tool_call>", tokens=("<arg_key>", "<arg_value>"))
