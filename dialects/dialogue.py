"""The chat messages inside a model call of any API: what was asked, what was replied, which tools were offered. Pure.

Invariants: bytes come from anyone, so whatever is no chat reads as nothing and never raises, except where a canonical
message is asked for: what cannot be one is an `Unsayable` with a code that names why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millrace.dialects.all import as_chat
from millrace.dialects.answers import mapping, text, thoughts_of
from millrace.dialects.rendering.base import Message
from millrace.infra.engines.upstream import NOT_WHOLE
from millrace.schemas.json_values import Json, JsonObject
from millrace.schemas.records import ModelCall, Trajectory

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
NAME_FIELDS = ("name", "tool_call_id")
"""texts of a message beside its content"""
COMPLETE = frozenset(
    {"stop", "stop_sequence", "end_turn", "completed", "tool_calls", "tool_call", "tool_use", "function_call"}
)
"""how replies finish that came to their end"""
USABLE_ENDS = frozenset({"completed", "truncated", "abandoned"})
"""how episodes end of which the replies count"""
CUT = "the reply did not come to its end"
EMPTY_REPLY = "the reply says nothing"
FRAGMENT = "it begins with the result of a tool that it does not call"
UNUSABLE = "its attempt failed, was aborted or has a flaw, so nothing of it may be learned"
NO_LESSON = frozenset({"unusable_attempt", "cut_reply", "empty_reply", "fragment"})
"""codes of chats that are sayable and yet no whole lesson"""


class Unsayable(Exception):
    """Something has no place where it should be written. `code`: why, for machines."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One call as a chat: the messages that the model read, its reply, the tools it was offered."""

    messages: list[Message]
    reply: Message
    tools: list[JsonObject]

    @property
    def whole(self) -> list[Message]:
        """Everything that was said, the reply last."""
        return [*self.messages, self.reply]


def dialogue(call: ModelCall) -> Dialogue:
    """The chat of a call in canonical messages. Raises Unsayable where there is none, one that is not all text, one of
    which the record leaves out what an earlier one said (see `requests`), or one that only an upstream has whole."""
    if call["opened"] == NOT_WHOLE:
        raise Unsayable("not_whole", f"call {call['call_id']} goes on from messages that only its upstream knows")
    if call["request_base"] is not None:
        raise Unsayable("not_whole", f"the request of call {call['call_id']} goes on from one that is not here")
    request, response = as_chat(call["request"], call["response"])
    fields = parse_object(request)
    messages, reply = fields.get("messages"), reply_of(response, call["choice"])
    if not isinstance(messages, list) or not messages:
        raise Unsayable("no_messages", f"call {call['call_id']} was not asked by chat messages")
    if reply is None:
        raise Unsayable("no_reply", f"the reply of call {call['call_id']} is no chat message")
    tools = fields.get("tools")
    _unicode(json.dumps(tools, ensure_ascii=False))
    offers = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    answer = {**reply, "role": "assistant"}
    return Dialogue([canonical(message) for message in messages], canonical(answer), offers)


def is_usable(record: Trajectory) -> bool:
    """Whether replies of a sealed attempt may be learned as text: it ended, and no flaw takes all of it out."""
    return record["status"] in USABLE_ENDS and not any(entry.startswith("*:") for entry in record["excluded"])


def lesson(record: Trajectory, call: ModelCall) -> Dialogue:
    """The chat of a call that is a whole lesson: what a model may learn to say, from a text alone. This is the one
    definition, for imitation and for every layout of text. Raises Unsayable for an attempt that is not usable, a reply
    that did not come to its end or says nothing, a conversation whose beginning is
    missing, and like `dialogue`."""
    if not is_usable(record):
        raise Unsayable("unusable_attempt", UNUSABLE)
    if call["finish_reason"].casefold() not in COMPLETE:
        raise Unsayable("cut_reply", CUT)
    chat = dialogue(call)
    if not chat.reply["content"].strip() and not chat.reply.get("tool_calls"):
        raise Unsayable("empty_reply", EMPTY_REPLY)
    for message in chat.messages:
        if message.get("tool_calls"):
            break
        if message["role"] in ("tool", "function"):
            raise Unsayable("fragment", FRAGMENT)
    return chat


def canonical(message: object) -> Message:
    """A message as {role, content} with `content` a text, which ends with what it says to refuse; and `tool_calls`,
    `name`, `tool_call_id` and `reasoning_content` where it has them, by whatever name. Raises Unsayable for what is
    none, or holds more than text."""
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise Unsayable("bad_message", "a message has no role of a chat")
    content = _text(message.get("content")) + _unicode(text(message.get("refusal")) or "")
    out: JsonObject = {"role": message["role"], "content": content}
    out |= {name: _unicode(str(message[name])) for name in NAME_FIELDS if message.get(name)}
    if thoughts := thoughts_of(message):
        out["reasoning_content"] = _unicode(thoughts)
    calls = message.get("tool_calls") or ([{"function": one}] if (one := message.get("function_call")) else [])
    if isinstance(calls, list) and calls:
        out["tool_calls"] = [_tool_call(call) for call in calls]
    return out


def _text(content: object) -> str:
    if content is None or isinstance(content, str):
        return _unicode(content or "")
    items = content if isinstance(content, list) else [content]
    parts = [part for part in items if not (isinstance(part, Mapping) and part.get("type") == "thinking")]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise Unsayable("not_text", "a message holds something that is no text")
    return _unicode("".join(text for text in texts if isinstance(text, str)))


def _unicode(text: str) -> str:
    """The text, which may not hold half a surrogate pair: JSON can name one, and no UTF-8 holds it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Unsayable("not_unicode", "a message holds half a surrogate pair") from None
    return text


def _tool_call(call: object) -> JsonObject:
    fields = mapping(call)
    function = mapping(fields.get("function"))
    if not isinstance(name := function.get("name"), str):
        raise Unsayable("bad_tool_call", "a tool call names no function")
    arguments = function.get("arguments", "")
    arguments_text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": _unicode(str(fields.get("id") or "")),
        "type": "function",
        "function": {"name": _unicode(name), "arguments": _unicode(arguments_text)},
    }


def parse_object(data: bytes) -> JsonObject:
    """The JSON object in some bytes; empty where there is none."""
    try:
        value = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def reply_of(response: bytes, choice: int) -> JsonObject | None:
    """The message of one of a response's choices, or the message that the response is; None where it is neither."""
    fields = parse_object(response)
    entries = fields.get("choices")
    choices = [one for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []
    message = next((one.get("message") for one in choices if one.get("index", 0) == choice), None)
    if isinstance(message, dict):
        return message
    return fields if "content" in fields else None


def asked_of(request: bytes) -> list[JsonObject] | None:
    """The messages of a request that came since the model last spoke; None for a request without messages."""
    messages = parse_object(request).get("messages")
    if not isinstance(messages, list):
        return None
    entries = [message for message in messages if isinstance(message, dict)]
    last = max((at for at, message in enumerate(entries) if message.get("role") == "assistant"), default=-1)
    return entries[last + 1 :]


def text_of(message: Mapping[str, Json]) -> str:
    """A message's text, a string or the text parts of a list; what is no text is passed over."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return str(content or "")


def calls_of(message: Mapping[str, Json]) -> Sequence[str]:
    """The tool calls of a message, each as JSON of its function."""
    calls = message.get("tool_calls")
    entries = calls if isinstance(calls, list) else []
    return [json.dumps(call.get("function") if isinstance(call, dict) else call) for call in entries]
