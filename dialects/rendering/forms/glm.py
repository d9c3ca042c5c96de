"""GLM 4.5 and later: the name, then `<arg_key>` and `<arg_value>` for each argument, between the tokens of Hermes
form."""

from __future__ import annotations

import re

from millrace.dialects.rendering.base import ToolCall
from millrace.dialects.rendering.forms.base import Form, Schemas, call, to_json_text, typed_value

# Atomic groups: a reply that repeats a mark without end is read in time that grows with its length alone.
ARGUMENT = re.compile(r"\s*<arg_key>(?>(.*?)</arg_key>)\s*<arg_value>(?>(.*?)</arg_value>)", re.DOTALL)


def read(text: str, schemas: Schemas) -> list[ToolCall]:
    """One call."""
    at = text.find("<arg_key>")
    name, body = (text, "") if at < 0 else (text[:at], text[at:])
    name = name.strip()
    if any(sign in name for sign in "<{\n"):
        raise ValueError("a call begins with a name")
    properties, arguments, at = schemas.get(name, {}), {}, 0
    while match := ARGUMENT.match(body, at):
        key = match.group(1).strip()
        arguments[key] = typed_value(match.group(2), properties.get(key))
        at = match.end()
    if body[at:].strip():
        raise ValueError("a call has arguments alone")
    return [call(name, to_json_text(arguments))]


GLM = Form("glm", read, "<tool_call>", "</tool_call>", tokens=("<arg_key>", "<arg_value>"))
