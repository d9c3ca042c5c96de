"""Spans of other conventions, in the words of GenAI: OpenInference, and the kinds of openllmetry. Pure.

OpenInference writes flat attributes and, of calls of a model, the raw request and reply: where those are JSON of a
known API they are read, since they are exact; else the flat ones.

https://github.com/Arize-ai/openinference/blob/main/spec/semantic_conventions.md

Invariants: a span that says its own `gen_ai.operation.name` stays as it is; an attribute that is there is never
replaced; what is no JSON, or no message, is left out, never made up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import orjson

from millrace.dialects.shape import unwieldy
from millrace.formats.episodes.rows import Content, text_of
from millrace.formats.spans.api_calls import raw_call
from millrace.formats.spans.otlp_json import Span

T = TypeVar("T")

OPERATION = "gen_ai.operation.name"
_KINDS = {"LLM": "chat", "TOOL": "execute_tool", "AGENT": "invoke_agent"}
_ENTITIES = {"tool": "execute_tool", "agent": "invoke_agent", "workflow": "invoke_workflow"}
_RENAMED = {
    "llm.model_name": "gen_ai.request.model",
    "llm.provider": "gen_ai.provider.name",
    "llm.token_count.prompt": "gen_ai.usage.input_tokens",
    "llm.token_count.completion": "gen_ai.usage.output_tokens",
    "llm.token_count.prompt_details.cache_read": "gen_ai.usage.cache_read.input_tokens",
    "session.id": "gen_ai.conversation.id",
    "agent.name": "gen_ai.agent.name",
    "tool.name": "gen_ai.tool.name",
    "tool_call.id": "gen_ai.tool.call.id",
    "tool.id": "gen_ai.tool.call.id",
}
_SAMPLING = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "max_tokens": "gen_ai.request.max_tokens",
}
_MESSAGE = re.compile(r"llm\.(input|output)_messages\.(\d{1,6})\.message\.(role|content|tool_call_id|name)")
_PART = re.compile(
    r"llm\.(input|output)_messages\.(\d{1,6})\.message\.contents\.(\d{1,4})\.message_content\.(type|text)"
)
_CALL = re.compile(
    r"llm\.(input|output)_messages\.(\d{1,6})\.message\.tool_calls\.(\d{1,4})\.tool_call\."
    r"(id|function\.name|function\.arguments)"
)
_TOOL = re.compile(r"llm\.tools\.(\d{1,4})\.tool\.json_schema")


def normal(span: Span) -> Span:
    """A span in the words of GenAI, itself where it has them, or is about something else."""
    known = span.attributes
    if span.log or OPERATION in known:
        return span
    kind = known.get("openinference.span.kind")
    if isinstance(kind, str):
        return replace(span, attributes={**_inferred(known, kind.upper()), **known})
    entity = known.get("traceloop.span.kind")
    if isinstance(entity, str) and entity in _ENTITIES:
        return replace(span, attributes={**_entity(known, _ENTITIES[entity]), **known})
    return span


def _entity(known: Mapping[str, object], operation: str) -> Content:
    out: Content = {OPERATION: operation}
    name = text_of(known, "traceloop.entity.name")
    if operation == "execute_tool":
        out["gen_ai.tool.name"] = name
        for given, field in (("input", "arguments"), ("output", "result")):
            if said := known.get(f"traceloop.entity.{given}"):
                out[f"gen_ai.tool.call.{field}"] = said
    elif operation == "invoke_agent" and name:
        out["gen_ai.agent.name"] = name
    if session := text_of(known, "traceloop.association.properties.session_id"):
        out["gen_ai.conversation.id"] = session
    return out


def _inferred(known: Mapping[str, object], kind: str) -> Content:
    out: Content = {new: known[old] for old, new in _RENAMED.items() if old in known}
    if kind not in _KINDS:
        # A chain, a retriever, a guardrail: only whose conversation it is.
        return {name: value for name, value in out.items() if name == "gen_ai.conversation.id"}
    out[OPERATION] = _KINDS[kind]
    if kind == "TOOL":
        for given, field in (("input.value", "arguments"), ("output.value", "result")):
            if known.get(given) is not None:
                out[f"gen_ai.tool.call.{field}"] = known[given]
    if kind == "LLM":
        sampling = parse_json(known.get("llm.invocation_parameters"))
        if isinstance(sampling, Mapping):
            out |= {new: sampling[old] for old, new in _SAMPLING.items() if old in sampling}
        out |= raw_call(parse_json(known.get("input.value")), parse_json(known.get("output.value"))) or _flat(known)
    return out


def _flat(known: Mapping[str, object]) -> Content:
    """Messages and tools out of an attribute for each field."""
    sides: dict[str, dict[int, Content]] = {"input": {}, "output": {}}
    tools: dict[int, object] = {}
    for name, value in known.items():
        if found := _MESSAGE.fullmatch(name):
            sides[found[1]].setdefault(int(found[2]), {})[found[3]] = value
        elif found := _PART.fullmatch(name):
            parts = sides[found[1]].setdefault(int(found[2]), {}).setdefault("parts", {})
            parts.setdefault(int(found[3]), {})[found[4]] = value
        elif found := _CALL.fullmatch(name):
            calls = sides[found[1]].setdefault(int(found[2]), {}).setdefault("calls", {})
            calls.setdefault(int(found[3]), {})[found[4]] = value
        elif found := _TOOL.fullmatch(name):
            tools[int(found[1])] = parse_json(value)
    out: Content = {}
    for side, name in (("input", "gen_ai.input.messages"), ("output", "gen_ai.output.messages")):
        role = "user" if side == "input" else "assistant"
        made = [_message(one, role) for one in _ordered(sides[side])]
        if made:
            out[name] = made
    if tool_list := [tool for tool in _ordered(tools) if isinstance(tool, Mapping)]:
        out["gen_ai.tool.definitions"] = tool_list
    return out


def _message(one: Content, role: str) -> Content:
    pieces: dict[int, Content] = one.get("parts", {})
    parts = [text_of(part, "text") for part in _ordered(pieces)]
    content = one.get("content")
    out: Content = {"role": one.get("role") or role, "content": content if isinstance(content, str) else "".join(parts)}
    for name in ("tool_call_id", "name"):
        if one.get(name):
            out[name] = str(one[name])
    asked: dict[int, Content] = one.get("calls", {})
    if calls := _ordered(asked):
        out["tool_calls"] = [
            {
                "id": text_of(call, "id"),
                "function": {
                    "name": text_of(call, "function.name"),
                    "arguments": call.get("function.arguments", "{}"),
                },
            }
            for call in calls
        ]
    return out


def _ordered(found: Mapping[int, T]) -> list[T]:
    return [one for _, one in sorted(found.items())]


def parse_json(value: object) -> object:
    """A structured value, which may have been written as JSON; None for text that is none, or too much of it."""
    if not isinstance(value, str):
        return value
    try:
        return None if unwieldy(value) else orjson.loads(value)
    except orjson.JSONDecodeError:
        return None
