"""What was said in an event, as refine stored it: `why --text`.

Invariants: only a governed event is read, so what was taken out of it, or withheld, is not shown here either; a model
call shows what came since the model last spoke, since what lies before it is shown above. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from millrace.consumers.history.rows import Row
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import Event

MOST = 4000
"""characters of one text that are shown"""
FIELDS: Mapping[str, tuple[str, ...]] = {
    "episode_started": ("task",),
    "episode_ended": ("output",),
    "tool_call": ("arguments",),
    "tool_result": ("content",),
    "observation": ("content",),
    "internal_state": ("summary",),
    "user_feedback": ("text",),
    "reward": ("critique",),
}
"""texts of a body, by the kind of its event"""


def spoken(event: Row[Event]) -> list[tuple[str, str]]:
    """(who or what, text) of everything that an event says."""
    try:
        body: Mapping[str, Any] = event.body
    except SchemaError:
        return []
    if event["kind"] == "model_call":
        request, response = (body[name].decode("utf-8", "replace") for name in ("request", "response"))
        said = [*_asked(request), *_replied(response, body["choice"])]
    else:
        said = [(name, body[name] or "") for name in FIELDS.get(event["kind"], ())]
    return [(name, _shortened(text)) for name, text in said if text]


def _asked(request: str) -> Iterator[tuple[str, str]]:
    """The messages behind the last one of the model."""
    found = _object(request)
    messages = found.get("messages")
    if not isinstance(messages, list):
        yield "request", request
        return
    given = [message for message in messages if isinstance(message, dict)]
    last = max((at for at, message in enumerate(given) if message.get("role") == "assistant"), default=-1)
    for message in given[last + 1 :]:
        yield str(message.get("role")), _content(message)


def _replied(response: str, choice: int) -> Iterator[tuple[str, str]]:
    """What the model said as one of its choices."""
    found = _object(response)
    given = found.get("choices")
    choices = [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    mine = next((one.get("message") for one in choices if one.get("index", 0) == choice), None)
    message = mine if isinstance(mine, dict) else found if "content" in found else None
    if message is None:
        yield "response", response
        return
    yield "assistant", _content(message)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        yield "assistant calls", json.dumps(call.get("function") if isinstance(call, dict) else call)


def _content(message: Mapping[str, Any]) -> str:
    """A message's text, a string or the text parts of a list."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return str(content or "")


def _object(text: str) -> dict[str, Any]:
    """The JSON object in a text; empty where there is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _shortened(text: str) -> str:
    return text if len(text) <= MOST else f"{text[:MOST]} ... ({len(text) - MOST} characters more)"
