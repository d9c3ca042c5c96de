"""What a reply is held to: JSON of a schema, or calls of tools, as a grammar for the engine.

Calls are held to the very tokens that the model's form puts around them, so that they are read like any others. Where
tools are offered beside a schema, a reply is calls or JSON. Thoughts may come first where the model can have them.

Invariants: what a grammar allows is what the parser of the form reads; no schema above `bounds.SCHEMA_BYTES`, and no
more than `bounds.PATTERNS` patterns reach an engine; a form whose tokens are not known here is refused, never
guessed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from millrace.dialects.conversation import Ask, ForcedCalls, unsupported_error
from millrace.dialects.errors import bad_request
from millrace.dialects.rendering.base import FormMarks
from millrace.infra.engines.base import Grammar
from millrace.schemas import bounds
from millrace.schemas.json_values import Json, JsonObject

NO_CALLS = "calls are held to a shape in Hermes form alone, which this model does not write"
ANY_OBJECT: JsonObject = {"type": "object"}
"""the schema of any JSON object"""


def grammar_of(ask: Ask, marks: FormMarks | None) -> Grammar | None:
    """What the reply to a request is held to, None where it is free. `marks` are the tokens of the model's form at this
    prompt. Raises ApiError 400 for what cannot be held to."""
    demand = ask.choice if isinstance(ask.choice, ForcedCalls) else None
    if demand is not None:
        param = "tool_choice"
    elif ask.output is not None:
        param = ask.output.param
    else:
        return None
    if marks is None:
        raise unsupported_error(param, "replies of this model's form cannot be held to a shape")
    tool_schemas = {} if ask.choice == "none" else _tool_schemas(ask)
    if demand is not None and demand.names:
        names = frozenset(demand.names)
        tool_schemas = {name: schema for name, schema in tool_schemas.items() if name in names}
    _check_patterns([*tool_schemas.values(), *([ask.output.schema] if ask.output is not None else ())], param)
    several = ask.parallel and not (demand is not None and len(demand.names) == 1)
    calls = _calls(marks, tool_schemas, several=several) if tool_schemas else None
    if demand is not None:
        if calls is None:
            raise unsupported_error(param, NO_CALLS)
        formats = [*_thoughts(marks), calls]
    else:
        assert ask.output is not None
        if tool_schemas and calls is None:
            raise unsupported_error(param, f"tools are offered beside it, and {NO_CALLS}: ask for one of both")
        schema = ANY_OBJECT if ask.output.schema is None else ask.output.schema
        thoughts = _thoughts(marks)
        if calls is None and not thoughts:
            return Grammar("json", _dump(schema, param))
        answer: JsonObject = {"type": "json_schema", "json_schema": schema}
        formats = [*thoughts, answer if calls is None else {"type": "or", "elements": [calls, answer]}]
    form = formats[0] if len(formats) == 1 else {"type": "sequence", "elements": formats}
    return Grammar("structural_tag", _dump({"type": "structural_tag", "format": form}, param))


def _tool_schemas(ask: Ask) -> JsonObject:
    """Schemas of the arguments of tools by name. Raises ApiError 400 for a tool that has no name, or no schema."""
    schemas: JsonObject = {}
    for at, tool in enumerate(ask.tools or ()):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        schema = (function.get("parameters") if isinstance(function, Mapping) else None) or ANY_OBJECT
        if not isinstance(name, str) or not isinstance(schema, Mapping):
            raise bad_request(f"tools[{at}]: a function has a name and a schema of its parameters", param="tools")
        schemas[name] = schema
    return schemas


def _calls(marks: FormMarks, tool_schemas: Mapping[str, Json], *, several: bool) -> JsonObject | None:
    if marks.call is None or marks.call_end is None:
        return None
    tags = [_call(marks.call, name, schema, marks.call_end) for name, schema in tool_schemas.items()]
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not several,
    }


def _call(begin: int, name: str, schema: Json, end: int) -> JsonObject:
    """One call in Hermes form."""
    opening = f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
    inner = [_const(opening), {"type": "json_schema", "json_schema": schema}, _const("}\n")]
    return {
        "type": "tag",
        "begin": _token(begin),
        "content": {"type": "sequence", "elements": inner},
        "end": _token(end),
    }


def _thoughts(marks: FormMarks) -> list[JsonObject]:
    """What may, or where the prompt opened them must, come before the reply itself."""
    if marks.think is None or marks.think_end is None or marks.thoughts == "closed":
        return []
    inner: JsonObject = {
        "type": "any_tokens",
        "exclude_tokens": sorted({marks.think, marks.think_end, *marks.stop_ids}),
    }
    rest: list[JsonObject] = [inner, _token(marks.think_end), {"type": "regex", "pattern": "\\n{0,2}"}]
    if marks.thoughts == "open":
        return rest
    block: JsonObject = {"type": "sequence", "elements": [_token(marks.think), *rest]}
    return [{"type": "optional", "content": block}]


def _const(text: str) -> JsonObject:
    return {"type": "const_string", "value": text}


def _token(id: int) -> JsonObject:
    return {"type": "token", "token": id}


def _dump(value: object, param: str) -> str:
    text = json.dumps(value)
    if len(text) > bounds.SCHEMA_BYTES:
        raise bad_request(f"{param}: schemas of {len(text)} bytes are more than {bounds.SCHEMA_BYTES}", param=param)
    return text


def _check_patterns(schemas: Iterable[Json], param: str) -> None:
    patterns = [pattern for schema in schemas for pattern in _patterns(schema)]
    if len(patterns) > bounds.PATTERNS:
        raise bad_request(f"{param}: {len(patterns)} patterns are more than {bounds.PATTERNS}", param=param)
    if any(len(pattern.encode(errors="surrogatepass")) > bounds.PATTERN_BYTES for pattern in patterns):
        raise bad_request(f"{param}: a pattern has at most {bounds.PATTERN_BYTES} bytes", param=param)


def _patterns(value: object) -> Iterator[str]:
    """The regular expressions of schemas, wherever they stand."""
    match value:
        case dict():
            for name, inner in value.items():
                if name == "pattern" and isinstance(inner, str):
                    yield inner
                elif name == "patternProperties" and isinstance(inner, dict):
                    yield from inner
                yield from _patterns(inner)
        case list():
            for inner in value:
                yield from _patterns(inner)
