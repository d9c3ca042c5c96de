"""What an event says, as refine stored it: in one line, and whole.

Invariants: only a governed event is read, so what was taken out of it, or withheld, is not shown here either; a model
call shows what came since the model last spoke, since what lies before it is shown above. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from millrace.dialects.all import as_chat
from millrace.dialects.dialogue import asked_of, calls_of, reply_of, text_of
from millrace.infra.engines.upstream import NOT_WHOLE
from millrace.infra.log.history.requests import WholeRequests
from millrace.infra.log.history.rows import Row
from millrace.schemas.arrays import unpack
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import EpisodeEnded, EpisodeStarted, Event, Gap, ModelCall, Reward, ToolCall, ToolResult

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


def texts_in(event: Row[Event], requests: WholeRequests) -> list[tuple[str, str]]:
    """(who or what, text) of everything that an event says. requests: those of the calls before it."""
    try:
        body: Mapping[str, Any] = requests.resolve(event) if event["kind"] == "model_call" else event.body
    except SchemaError:
        return []
    if event["kind"] == "model_call":
        request, response = as_chat(body["request"], body["response"])
        texts = [*_messages(request), *_reply(response, body["choice"])]
    else:
        texts = [(name, body[name] or "") for name in FIELDS.get(event["kind"], ())]
    return [
        (name, text if len(text) <= MOST else f"{text[:MOST]} ... ({len(text) - MOST} characters more)")
        for name, text in texts
        if text
    ]


def _messages(request: bytes) -> Iterator[tuple[str, str]]:
    """The messages behind the last one of the model."""
    messages = asked_of(request)
    if messages is None:
        yield "request", request.decode("utf-8", "replace")
        return
    for message in messages:
        yield str(message.get("role")), text_of(message)


def _reply(response: bytes, choice: int) -> Iterator[tuple[str, str]]:
    """What the model said as one of its choices."""
    message = reply_of(response, choice)
    if message is None:
        yield "response", response.decode("utf-8", "replace")
        return
    yield "assistant", text_of(message)
    for call in calls_of(message):
        yield "assistant calls", call


def event_line(row: Row[Event]) -> str:
    """One line about an event."""
    try:
        body = row.body
    except SchemaError:
        return f"{row['kind']} (its body cannot be read)"
    match row["kind"]:
        case "model_call":
            call: ModelCall = body
            try:
                versions = unpack(call["output_versions"])
            except SchemaError:
                return f"model call of policy {row['policy']}, reply {call['response_id']} (its tokens cannot be read)"
            origin = f"{len(versions)} tokens"
            if len(versions):
                low, high = int(versions.min()), int(versions.max())
                origin += f" of version {low}" if low == high else f" of versions {low} to {high}"
            retry = f", retries {call['supersedes']}" if call["supersedes"] else ""
            bar = "" if call["trainable"] else f", untrainable: {call['untrainable_reason']}"
            partly = f", not whole: {NOT_WHOLE}" if call["opened"] == NOT_WHOLE else ""
            identity = f", identified by {call['identified_by']}" if call["identified_by"] else ""
            return (
                f"model call of policy {row['policy']}, reply {call['response_id']}: {origin}, {call['finish_reason']}"
                f"{retry}{bar}{identity}{partly}"
            )
        case "reward":
            reward: Reward = body
            value = f"{reward['value']:.4g}" if reward["value"] is not None else f"missing ({reward['failure']})"
            origin = f", made by replay {reward['replay']}: it counts for no sample" if reward["replay"] else ""
            return f"reward {value} from {reward['source']} for {reward['target_kind']} {reward['target']}{origin}"
        case "episode_started":
            start: EpisodeStarted = body
            return f"started: task {start['task_id']}, sample {start['sample']} of {start['group_size']}"
        case "episode_ended":
            end: EpisodeEnded = body
            reason = f", {end['reason']}" if end["reason"] else ""
            return f"ended: {end['status']} ({end['stop_condition']}){reason}"
        case "tool_call" | "tool_result":
            tool: ToolCall | ToolResult = body
            return f"{row['kind'].replace('_', ' ')} {tool['name']} ({tool['call_id']})"
        case "gap":
            gap: Gap = body
            return f"gap: {gap['missed']} events lost, {gap['reason']}"
        case kind:
            return str(kind).replace("_", " ")


def governance_notes(event: Row[Event], *, findings: bool = False) -> list[str]:
    """What refine did to an event that is out of the ordinary. findings: with what was taken out of it."""
    governance, notes = event["governance"], list[str]()
    if governance is None:
        return notes
    if governance["eligibility"] in ("denied", "audit_only"):
        notes.append(f"{governance['eligibility']}: {governance['reason']}")
    if governance["redaction"] != "none_needed":
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(governance["counts"].items()))
        notes.append(f"redaction {governance['redaction']}" + (f": {counts or 'no findings'}" if findings else ""))
    return notes
