"""What a GenAI span says: its messages, in whichever of the forms that instrumentations write. Pure.

Forms, the first that holds something is taken: attributes `gen_ai.input.messages` and `gen_ai.output.messages` (JSON
text or structured) on the span or on an event `gen_ai.client.inference.operation.details`; events from
`gen_ai.user.message` to `gen_ai.choice` (of the span, or log records beside it); flat attributes such as
`gen_ai.prompt.0.role`.

https://opentelemetry.io/docs/specs/semconv/gen-ai/

Invariants: a message becomes one of OpenAI's form, or is refused; nothing is made up for content that was not
recorded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from millrace.formats.episodes.messages import message
from millrace.formats.episodes.rows import BadRow, Content, json_text, text_of
from millrace.formats.spans.otlp_json import Span, SpanEvent
from millrace.schemas import bounds

CALLS = frozenset({"chat", "generate_content", "text_completion"})
TOOLS = frozenset({"execute_tool"})
AGENTS = frozenset({"invoke_agent", "create_agent", "invoke_workflow"})
DETAILS = "gen_ai.client.inference.operation.details"
CONVERSATION = "gen_ai.conversation.id"
RESPONSE = "gen_ai.response.id"
EVALUATION = "gen_ai.evaluation.result"
_ROLES = {"human": "user", "model": "assistant", "ai": "assistant"}
_EVENTS = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
_FLAT = re.compile(r"gen_ai\.(prompt|completion)\.(\d{1,6})\.(role|content|finish_reason|tool_call_id)")
_FLAT_CALL = re.compile(r"gen_ai\.(prompt|completion)\.(\d{1,6})\.tool_calls\.(\d{1,4})\.(id|name|arguments)")


@dataclass(slots=True)
class Talk:
    """What a call read and what it replied, as far as it was recorded."""

    prompts: list[Content] = field(default_factory=list)
    replies: list[Content] = field(default_factory=list)
    tools: list[Content] = field(default_factory=list)
    finish: str = ""


def operation(span: Span) -> str:
    """What a span did: an operation of the conventions, empty for a span of something else."""
    attributes = span.attributes
    name = attributes.get("gen_ai.operation.name")
    if isinstance(name, str):
        return name
    if "gen_ai.tool.name" in attributes:
        return "execute_tool"
    return "chat" if "gen_ai.request.model" in attributes or RESPONSE in attributes else ""


def conversation_name(span: Span) -> str:
    """The conversation that a span names; empty where it names none, or one that is no name."""
    name = text_of(span.attributes, CONVERSATION)
    return name if len(name.encode("utf-8", "replace")) <= bounds.NAME_BYTES - len("conversation ") else ""


def matters(span: Span) -> bool:
    """Whether a span or a log record is about a model, an agent or a tool."""
    if span.log:
        return span.name.startswith("gen_ai.")
    return bool(operation(span))


def talk(span: Span, beside: Iterable[SpanEvent]) -> Talk:
    """The messages of a call. beside: events of log records with its id. Raises BadRow for messages that are none."""
    events = [*span.events, *beside]
    details = [one.attributes for one in events if one.name == DETAILS]
    for attributes in (span.attributes, *details):
        candidate = _attribute_talk(attributes)
        if candidate.replies or candidate.prompts:
            return candidate
    candidate = _event_talk(events)
    return candidate if candidate.replies or candidate.prompts else _flat(span.attributes)


def _attribute_talk(attributes: Mapping[str, object]) -> Talk:
    out = Talk(tools=_tools(attributes.get("gen_ai.tool.definitions")))
    system = _parse(attributes.get("gen_ai.system_instructions"))
    if system:
        out.prompts += _message({"role": "system", "parts": [*system] if isinstance(system, list) else [system]})
    for name, to in (("gen_ai.input.messages", out.prompts), ("gen_ai.output.messages", out.replies)):
        for one in _message_list(_parse(attributes.get(name)), name):
            to += _message(one)
    finish = _message_list(_parse(attributes.get("gen_ai.output.messages")), "")
    out.finish = next((str(one["finish_reason"]) for one in finish if one.get("finish_reason")), "")
    return out


def _message(one: Mapping[str, object]) -> list[Content]:
    """A message of parts as one of OpenAI's, or several: each answer of a tool is its own."""
    role = str(one.get("role", ""))
    role = _ROLES.get(role, role)
    parts = one.get("parts")
    if not isinstance(parts, list):
        fields = {name: value for name, value in one.items() if name != "finish_reason"}
        return [message({**fields, "role": role}, "a message")]
    out: Content = {"role": role}
    answers: list[Content] = []
    content: list[Content] = []
    calls: list[Content] = []
    for part in parts:
        if isinstance(part, str):
            part = {"type": "text", "content": part}
        if not isinstance(part, Mapping):
            raise BadRow("bad_message", "a part of a message is no object")
        match part.get("type"):
            case "text":
                content.append({"type": "text", "text": _text(part.get("content"))})
            case "reasoning":
                out["reasoning_content"] = out.get("reasoning_content", "") + _text(part.get("content"))
            case "tool_call":
                function = {"name": part.get("name"), "arguments": _text(part.get("arguments"))}
                calls.append({"id": text_of(part, "id"), "type": "function", "function": function})
            case "tool_call_response":
                answer = _text(part.get("response", part.get("result")))
                answers.append({"role": "tool", "tool_call_id": text_of(part, "id"), "content": answer})
            case str():
                content.append(dict(part))
            case _:
                raise BadRow("bad_message", "a part of a message has no type")
    texts = all(part["type"] == "text" for part in content)
    out["content"] = "".join(part["text"] for part in content) if texts else content
    if calls:
        out["tool_calls"] = calls
    messages = [message(out, "a message")] if content or calls or len(out) > 2 or not answers else []
    return [*messages, *answers]


def _event_talk(events: Sequence[SpanEvent]) -> Talk:
    """Messages that are an event each."""
    out = Talk()
    for one in sorted(events, key=lambda event: event.at or 0):
        attributes = one.attributes
        text = attributes.get("gen_ai.event.content")
        if isinstance(text, str):
            read = _parse(text)
            attributes = {**attributes, **(read if isinstance(read, dict) else {"content": text})}
        if one.name in _EVENTS:
            out.prompts.append(_openai_message(attributes, _EVENTS[one.name]))
        elif one.name == "gen_ai.choice":
            inner = _parse(attributes.get("message"))
            out.replies.append(_openai_message(inner if isinstance(inner, dict) else attributes, "assistant"))
            out.finish = out.finish or str(attributes.get("finish_reason") or "")
        elif one.name in ("gen_ai.content.prompt", "gen_ai.content.completion"):
            side = one.name.rpartition(".")[2]
            content = _parse(attributes.get(f"gen_ai.{side}"))
            to, role = (out.prompts, "user") if side == "prompt" else (out.replies, "assistant")
            to += (
                [message(part, side) for part in content]
                if isinstance(content, list)
                else [_text_message(content, role)]
            )
    return out


def _openai_message(attributes: Mapping[str, object], role: str) -> Content:
    """A message whose fields are those of OpenAI, among attributes that are not."""
    out: Content = {"role": attributes.get("role", role), "content": attributes.get("content") or ""}
    if not isinstance(out["content"], str | list):
        out["content"] = json_text(out["content"])
    if role == "tool" and attributes.get("id"):
        out["tool_call_id"] = str(attributes["id"])
    calls = _parse(attributes.get("tool_calls"))
    if calls:
        out["tool_calls"] = calls
    return message(out, "a message")


def _text_message(text: object, role: str) -> Content:
    return {"role": role, "content": _text(text)}


def _flat(attributes: Mapping[str, object]) -> Talk:
    """Messages that are an attribute for each field."""
    sides: dict[str, dict[int, Content]] = {"prompt": {}, "completion": {}}
    for name, value in attributes.items():
        if match := _FLAT.fullmatch(name):
            sides[match[1]].setdefault(int(match[2]), {})[match[3]] = value
        elif match := _FLAT_CALL.fullmatch(name):
            calls = sides[match[1]].setdefault(int(match[2]), {}).setdefault("calls", {})
            calls.setdefault(int(match[3]), {})[match[4]] = value
    out = Talk()
    for side, to, role in (("prompt", out.prompts, "user"), ("completion", out.replies, "assistant")):
        for _, one in sorted(sides[side].items()):
            fields: Content = {"role": one.get("role", role), "content": _text(one.get("content"))}
            if one.get("tool_call_id"):
                fields["tool_call_id"] = str(one["tool_call_id"])
            calls = [
                {
                    "id": text_of(call, "id"),
                    "function": {"name": call.get("name"), "arguments": _text(call.get("arguments"))},
                }
                for _, call in sorted(one.get("calls", {}).items())
            ]
            to.append(message(fields | ({"tool_calls": calls} if calls else {}), side))
            out.finish = out.finish or (str(one.get("finish_reason") or "") if side == "completion" else "")
    return out


def _tools(definitions: object) -> list[Content]:
    """Definitions of tools in the form of OpenAI."""
    entries = _parse(definitions)
    out = []
    for one in entries if isinstance(entries, list) else []:
        tool = _parse(one)
        if isinstance(tool, dict):
            inner = {name: value for name, value in tool.items() if name != "type"}
            out.append(tool if "function" in tool else {"type": "function", "function": inner})
    return out


def _parse(value: object) -> object:
    """A structured value, which may have been written as JSON."""
    if isinstance(value, str):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    return value


def _message_list(value: object, name: str) -> list[Content]:
    if value in (None, ""):
        return []
    entries = [_parse(one) for one in value] if isinstance(value, list) else [None]
    messages = [one for one in entries if isinstance(one, dict)]
    if len(messages) < len(entries):
        raise BadRow("bad_message", f"{name} is no list of messages: was it cut off? Raise the exporter's limit")
    return messages


def _text(value: object) -> str:
    return "" if value is None else value if isinstance(value, str) else json_text(value)
