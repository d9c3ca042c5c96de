"""The tools of OpenAI's Responses as the model knows them: functions, those of a `namespace` under one name of both.

Invariants: every tool has a name of its own, and one way back to what its client calls it; the name follows from the
request alone, so an echoed call and a recorded one have the name that the model wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from millrace.dialects.conversation import unsupported_error
from millrace.dialects.errors import ApiError, bad_request
from millrace.dialects.rendering.base import Tools
from millrace.schemas import bounds
from millrace.schemas.json_values import Json, JsonObject

HOSTED_TYPES = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search")
"""how the kinds of tools begin that OpenAI runs itself: no model of ours is shown one"""
BETWEEN = "__"
"""stands between a namespace and a function, as clients of MCP write it"""


def full_name(item: Mapping[str, Json], name: str) -> str:
    """What the model calls the function `name` of an item, a tool or a choice."""
    space = item.get("namespace")
    return f"{space}{BETWEEN}{name}" if isinstance(space, str) and space else name


def custom_arguments(input_text: str) -> str:
    """The text that a custom tool was called with, as the arguments of a call."""
    return msgspec.json.encode({"input": input_text}).decode()


def tools_of(tools: list[JsonObject] | None, *, strict: bool = True) -> Tools:
    """The tools as templates want them, so that clients of any API offer the same ones; those of `hosted_places` are
    not among them. Raises ApiError 400; not `strict`: tools that no model of ours could call stay as they are."""
    if not tools:
        return None
    if not strict:
        try:
            return tools_of(tools)
        except ApiError:
            return [_to_function(tool) for tool in tools]
    functions = list(_functions(tools))
    names = {tool["function"]["name"] for tool, _ in functions}
    if any(tool.get("type") == "namespace" for tool in tools) and len(names) < len(functions):
        raise bad_request("tools: two of them have one name, their namespaces included", param="tools")
    return [tool for tool, _ in functions] or None


def strict_names(tools: list[dict[str, Any]] | None) -> frozenset[str]:
    """Names of the functions, as the model has them, that are said to be strict; of tools that `tools_of` takes."""
    out = set[str]()
    for tool in tools or ():
        members = tool["tools"] if tool.get("type") == "namespace" else [tool]
        space = tool.get("name") if tool.get("type") == "namespace" else None
        functions = [one for one in members if one.get("strict") is True and isinstance(one.get("name"), str)]
        out |= {full_name({"namespace": space}, one["name"]) for one in functions}
    return frozenset(out)


def hosted_places(tools: list[JsonObject] | None) -> tuple[str, ...]:
    """Places of tools that only OpenAI could run."""
    return tuple(f"tools[{at}]" for at, tool in enumerate(tools or ()) if _is_hosted(tool))


def _is_hosted(tool: JsonObject) -> bool:
    kind = tool.get("type")
    return isinstance(kind, str) and kind.startswith(HOSTED_TYPES)


def _to_function(tool: JsonObject) -> JsonObject:
    try:
        return _function(tool, "", None, "")
    except ApiError:
        return tool


def inside(tools: list[JsonObject] | None) -> dict[str, tuple[str, str]]:
    """(namespace, name) of each function of a namespace, by the model's name of it. Raises ApiError 400."""
    if not any(tool.get("type") == "namespace" for tool in tools or ()):  # as in most
        return {}
    return {tool["function"]["name"]: at for tool, at in _functions(tools or []) if at is not None}


def _functions(tools: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], tuple[str, str] | None]]:
    for at, tool in enumerate(tools):
        place = f"tools[{at}]"
        if _is_hosted(tool):
            continue
        if tool.get("type") != "namespace":
            yield _function(tool, place, None, ""), None
            continue
        name, about, members = tool.get("name"), tool.get("description"), tool.get("tools")
        if not isinstance(name, str) or not name or not isinstance(about, str | None) or not isinstance(members, list):
            raise bad_request(f"{place}: a namespace has a name, a description and tools", param=place)
        for number, inner in enumerate(members):
            if not isinstance(inner, dict):
                raise bad_request(f"{place}.tools[{number}]: is no object", param=place)
            # The model is told once what they are for.
            function = _function(inner, f"{place}.tools[{number}]", name, "" if number else about or "")
            yield function, (name, inner["name"])


def _function(tool: JsonObject, place: str, space: str | None, about: str) -> JsonObject:
    if tool.get("type") != "function":
        raise unsupported_error(place, f"only functions and namespaces of them are supported, not {tool.get('type')!r}")
    name, schema, description = tool.get("name"), tool.get("parameters"), tool.get("description")
    if not isinstance(name, str) or not isinstance(schema, dict | None) or not isinstance(description, str | None):
        raise bad_request(f"{place}: a function has a name, parameters and a description", param=place)
    details = {"description": "\n\n".join(filter(None, (about, description))) or description, "parameters": schema}
    fields = {field: value for field, value in details.items() if value is not None}
    model_name = full_name({"namespace": space}, name)
    return {"type": "function", "function": {"name": check_name(model_name, place), **fields}}


def check_name(name: str, place: str) -> str:
    """A name, or an id. Raises ApiError 400 for one too long."""
    if len(name) > bounds.NAME_BYTES // 4 and len(name.encode(errors="surrogatepass")) > bounds.NAME_BYTES:
        raise _too_long(place)
    return name


def _too_long(place: str) -> ApiError:
    return bad_request(f"{place}: A name is longer than {bounds.NAME_BYTES} bytes", param=place)
