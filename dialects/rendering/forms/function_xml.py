"""Qwen3-Coder, Qwen 3.5 and later, Nemotron 3: `<function=f>` with a `<parameter=a>` for each argument, between the
tokens of Hermes form."""

from __future__ import annotations

import re

from millrace.dialects.rendering.base import ToolCall
from millrace.dialects.rendering.forms.base import Form, Schemas, call, to_json_text, typed_value

FUNCTION = re.compile(r"\s*<function=([^>]+)>(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^>]+)>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)


def read(text: str, schemas: Schemas) -> list[ToolCall]:
    """One call. A value may hold what looks like an end, if no parameter follows it."""
    function = FUNCTION.fullmatch(text)
    if function is None:
        raise ValueError("a call is a function")
    name, body = function.group(1).strip(), function.group(2)
    properties, arguments, at = schemas.get(name, {}), {}, 0
    while match := PARAMETER.match(body, at):
        key = match.group(1).strip()
        arguments[key] = typed_value(match.group(2).removeprefix("\n").removesuffix("\n"), properties.get(key))
        at = match.end()
    if body[at:].strip():
        raise ValueError("a function has parameters alone")
    return [call(name, to_json_text(arguments))]


FUNCTION_XML = Form("function_xml", read, "<tool_call>", "</tool_call>")
