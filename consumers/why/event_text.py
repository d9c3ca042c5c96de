"""What was said in an event, as refine stored it: `why --text`.

Invariants: only a governed event is read, so what was taken out of it, or withheld, is not shown here either; a model
call shows what came since the model last spoke, since what lies before it is shown above. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from millrace.dialects.all import as_chat
from millrace.dialects.dialogue import asked_of, calls_of, reply_of, text_of
from millrace.infra.log.history.requests import WholeRequests
from millrace.infra.log.history.rows import Row
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


def spoken(event: Row[Event], requests: WholeRequests) -> list[tuple[str, str]]:
    """(who or what, text) of everything that an event says. requests: those of the calls before it."""
    try:
        body: Mapping[str, Any] = requests.whole(event) if event["kind"] == "model_call" else event.body
    except SchemaError:
        return []
    if event["kind"] == "model_call":
        request, response = as_chat(body["request"], body["response"])
        said = [*_asked(request), *_replied(response, body["choice"])]
    else:
        said = [(name, body[name] or "") for name in FIELDS.get(event["kind"], ())]
    return [(name, _shortened(text)) for name, text in said if text]


def _asked(request: bytes) -> Iterator[tuple[str, str]]:
    """The messages behind the last one of the model."""
    messages = asked_of(request)
    if messages is None:
        yield "request", request.decode("utf-8", "replace")
        return
    for message in messages:
        yield str(message.get("role")), text_of(message)


def _replied(response: bytes, choice: int) -> Iterator[tuple[str, str]]:
    """What the model said as one of its choices."""
    message = reply_of(response, choice)
    if message is None:
        yield "response", response.decode("utf-8", "replace")
        return
    yield "assistant", text_of(message)
    for call in calls_of(message):
        yield "assistant calls", call


def _shortened(text: str) -> str:
    return text if len(text) <= MOST else f"{text[:MOST]} ... ({len(text) - MOST} characters more)"
