"""Chats of other tools, checked: messages in the form of OpenAI, and the steps of a conversation. Pure.

Invariants: a message keeps every key that it came with, but nulls; arguments of a tool call are text; a reply counts as
one only where something was asked before it; whatever is no chat is a `BadRow`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from millrace.dialects.answers import mapping
from millrace.formats.episodes.episode import ReplyStep, Step, ToolAnswerStep, UnansweredStep
from millrace.formats.episodes.rows import BadRow, Content, json_text, text_of, time_of
from millrace.schemas.ids import Micros

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def chat(value: object, name: str) -> list[Content]:
    """A list of messages. Raises BadRow."""
    if isinstance(value, str):
        value = _parse_json(value)
    if not isinstance(value, list) or not value:
        raise BadRow("no_messages", f"{name} is no list of messages")
    return [message(one, f"{name}[{at}]") for at, one in enumerate(value)]


def said_or_chat(value: object, name: str, role: str) -> list[Content]:
    """A list of messages, or a text that is one message of `role`. Raises BadRow."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return chat(value, name)


def message(value: object, name: str) -> Content:
    """One message. Raises BadRow."""
    if not isinstance(value, Mapping) or not isinstance(role := value.get("role"), str) or role not in ROLES:
        raise BadRow("bad_message", f"{name} has no role of a chat ({', '.join(sorted(ROLES))})")
    out: Content = dict(value)
    content = out.setdefault("content", "")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in content):
            raise BadRow("bad_message", f"{name} has a part of its content without a type")
    elif not isinstance(content, str):
        raise BadRow("bad_message", f"the content of {name} is neither text nor a list of parts")
    calls = out.pop("tool_calls", None)
    if isinstance(calls, list) and calls:
        out["tool_calls"] = [_tool_call(call, name) for call in calls]
    elif calls:
        raise BadRow("bad_message", f"the tool_calls of {name} are no list")
    return out


def tool_list(value: object) -> list[Content]:
    """The tools that a row offers, a list or one as JSON text. Raises BadRow."""
    tools = _parse_json(value) if isinstance(value, str) and value else value
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRow("bad_tools", "the tools are no list of objects")
    return [dict(tool) for tool in tools]


def conversation(
    messages: Sequence[Content], tools: Sequence[Content], at: Micros | None, first: int = 0
) -> list[Step]:
    """The steps of a conversation whose replies from message `first` on are the policy's. at: when it began, where
    that is known; messages may say it themselves. Raises BadRow where there is no reply."""
    steps: list[Step] = []
    names: dict[str, str] = {}
    last = max((n for n, one in enumerate(messages) if one["role"] == "assistant"), default=-1)
    for number, one in enumerate(messages):
        when = at = time_of(one) or at
        role = one["role"]
        if role == "assistant":
            for call in one.get("tool_calls", ()):
                names[call["id"]] = call["function"]["name"]
            if number >= first and number > 0:
                steps.append(ReplyStep(messages, number, one, tools, when))
        elif role in ("tool", "function") and number >= first:
            call_id = text_of(one, "tool_call_id")
            name = text_of(one, "name") or names.get(call_id, "")
            steps.append(ToolAnswerStep(call_id, name, text_content(one), at=when))
        elif number > last:
            steps.append(UnansweredStep(text_content(one), role, when))
    if not any(isinstance(step, ReplyStep) for step in steps):
        raise BadRow("no_reply", "no message of the assistant follows another: there is nothing that a policy did")
    return steps


def text_content(one: Content) -> str:
    """The content of a message as text: text parts joined, others as JSON."""
    content = one["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] if isinstance(part.get("text"), str) else json_text(part) for part in content)


def _tool_call(call: object, name: str) -> Content:
    call_fields = mapping(call)
    function = call_fields.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRow("bad_tool_call", f"a tool call of {name} names no function")
    arguments = function.get("arguments", "")
    arguments = arguments if isinstance(arguments, str) else json_text(arguments)
    fields = {key: value for key, value in call_fields.items() if key not in ("function", "id", "type")}
    inner = {**function, "arguments": arguments}
    return {"id": text_of(call_fields, "id"), "type": "function", **fields, "function": inner}


def _parse_json(text: str) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raise BadRow("not_json", "a text that should be JSON is none") from None
