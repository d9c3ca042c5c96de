"""Calls as Python writes them, `[f(a=1), g(b="x")]`: LFM2 between tokens, Llama 3.2 and 4 as a whole reply."""

from __future__ import annotations

import ast

from millrace.dialects.rendering.base import ToolCall
from millrace.dialects.rendering.forms.base import Form, Schemas, call, to_json_text
from millrace.schemas import bounds
from millrace.schemas.json_values import Json

JSON_NAMES = {"true": True, "false": False, "null": None}
LONGEST = bounds.SCHEMA_BYTES
"""characters of a block that is read: a longer one would keep Python's lock for too long"""


def read(text: str, schemas: Schemas) -> list[ToolCall]:
    """All calls of a reply."""
    if len(text) > LONGEST:
        raise ValueError("a block is too long")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("a block is a list of calls")
    return [_call(one) for one in tree.elts]


def read_and_check(text: str, schemas: Schemas) -> list[ToolCall]:
    """All calls of a reply, of tools that are offered: any other list is an answer."""
    calls = read(text, schemas)
    if any(one.name not in schemas for one in calls):
        raise ValueError("a call is of a tool that is offered")
    return calls


def begins(text: str) -> bool | None:
    """Whether a reply begins a list."""
    text = text.lstrip()
    return text.startswith("[") if text else None


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("a call names its arguments")
    arguments = {}
    for one in node.keywords:
        if one.arg is None:
            raise ValueError("a call names its arguments")
        arguments[one.arg] = _value(one.value)
    return call(ast.unparse(node.func), to_json_text(arguments))


def _value(node: ast.expr) -> Json:
    match node:
        case ast.Name(id=name) if name in JSON_NAMES:
            return JSON_NAMES[name]
        case ast.List(elts=inner):
            return [_value(one) for one in inner]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise ValueError("a value is a constant")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a name is text")


LFM2 = Form("lfm2", read, "<|tool_call_start|>", "<|tool_call_end|>")
PYTHONIC = Form("pythonic", read_and_check, bare=begins)
