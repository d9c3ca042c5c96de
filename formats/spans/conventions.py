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
_NEW_NAMES = {
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
    attributes = span.attributes
    if span.log or OPERATION in attributes:
        return span
    kind = attributes.get("openinference.span.kind")
    if isinstance(kind, str):
        return replace(span, attributes={**_infer_attributes(attributes, kind.upper()), **attributes})
    entity = attributes.get("traceloop.span.kind")
    if isinstance(entity, str) and entity in _ENTITIES:
        return replace(span, attributes={**_entity(attributes, _ENTITIES[entity]), **attributes})
    return span


def _entity(attributes: Mapping[str, object], operation: str) -> Content:
    out: Content = {OPERATION: operation}
    name = text_of(attributes, "traceloop.entity.name")
    if operation == "execute_tool":
        out["gen_ai.tool.name"] = name
        for source, field in (("input", "arguments"), ("output", "result")):
            if value := attributes.get(f"traceloop.entity.{source}"):
                out[f"gen_ai.tool.call.{field}"] = value
    elif operation == "invoke_agent" and name:
        out["gen_ai.agent.name"] = name
    if session := text_of(attributes, "traceloop.association.properties.session_id"):
        out["gen_ai.conversation.id"] = session
    return out


def _infer_attributes(attributes: Mapping[str, object], kind: str) -> Content:
    out: Content = {
        new_name: attributes[old_name] for old_name, new_name in _NEW_NAMES.items() if old_name in attributes
    }
    if kind not in _KINDS:
        # A chain, a retriever, a guardrail: only whose conversation it is.
        return {name: value for name, value in out.items() if name == "gen_ai.conversation.id"}
    out[OPERATION] = _KINDS[kind]
    if kind == "TOOL":
        for source, field in (("input.value", "arguments"), ("output.value", "result")):
            if attributes.get(source) is not None:
                out[f"gen_ai.tool.call.{field}"] = attributes[source]
    if kind == "LLM":
        sampling = parse_json(attributes.get("llm.invocation_parameters"))
        if isinstance(sampling, Mapping):
            out |= {new_name: sampling[old_name] for old_name, new_name in _SAMPLING.items() if old_name in sampling}
        out |= raw_call(parse_json(attributes.get("input.value")), parse_json(attributes.get("output.value"))) or _flat(
            attributes
        )
    return out


def _flat(attributes: Mapping[str, object]) -> Content:
    """Messages and tools out of an attribute for each field."""
    sides: dict[str, dict[int, Content]] = {"input": {}, "output": {}}
    tools: dict[int, object] = {}
    for name, value in attributes.items():
        if match := _MESSAGE.fullmatch(name):
            sides[match[1]].setdefault(int(match[2]), {})[match[3]] = value
        elif match := _PART.fullmatch(name):
            parts = sides[match[1]].setdefault(int(match[2]), {}).setdefault("parts", {})
            parts.setdefault(int(match[3]), {})[match[4]] = value
        elif match := _CALL.fullmatch(name):
            calls = sides[match[1]].setdefault(int(match[2]), {}).setdefault("calls", {})
            calls.setdefault(int(match[3]), {})[match[4]] = value
        elif match := _TOOL.fullmatch(name):
            tools[int(match[1])] = parse_json(value)
    out: Content = {}
    for side, name in (("input", "gen_ai.input.messages"), ("output", "gen_ai.output.messages")):
        role = "user" if side == "input" else "assistant"
        messages = [_message(one, role) for one in _in_order(sides[side])]
        if messages:
            out[name] = messages
    if tool_list := [tool for tool in _in_order(tools) if isinstance(tool, Mapping)]:
        out["gen_ai.tool.definitions"] = tool_list
    return out


def _message(one: Content, role: str) -> Content:
    pieces: dict[int, Content] = one.get("parts", {})
    parts = [text_of(part, "text") for part in _in_order(pieces)]
    content = one.get("content")
    out: Content = {"role": one.get("role") or role, "content": content if isinstance(content, str) else "".join(parts)}
    for name in ("tool_call_id", "name"):
        if one.get(name):
            out[name] = str(one[name])
    call_pieces: dict[int, Content] = one.get("calls", {})
    if calls := _in_order(call_pieces):
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


def _in_order(by_number: Mapping[int, T]) -> list[T]:
    return [one for _, one in sorted(by_number.items())]


def parse_json(value: object) -> object:
    """A structured value, which may have been written as JSON; None for text that is none, or too much of it."""
    if not isinstance(value, str):
        return value
    try:
        return None if unwieldy(value) else orjson.loads(value)
    except orjson.JSONDecodeError:
        return None
