"""Threads of Anthropic's Messages that an upstream keeps: a turn that names the message it goes on from, made whole.

A thread is kept as items: first its system prompt and tools, then its messages.

Invariants: a whole request says what it would have said, had its client sent every message again; one that names what
is not known here stays as it came, and is never taken for a whole one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from millrace.dialects.answers import mapping
from millrace.dialects.errors import ApiError, bad_request
from millrace.dialects.reading.reader import NamedBefore
from millrace.dialects.stored_responses import Recall, StoredRequest
from millrace.schemas.json_values import Json

THREAD = "thread"
HEAD = ("system", "tools")
"""what a turn of a thread need not say again"""


def previous_message(thread: object) -> str | None:
    """The message that a turn goes on from."""
    id = mapping(thread).get("previous_message_id")
    return id if isinstance(id, str) and id else None


def for_record(body: bytes, recall: Recall) -> NamedBefore | None:
    """A turn as its record has it: whole where the thread is known. None for one that goes on from no message. Raises
    ApiError for another caller's thread."""
    fields = _fields(body)
    previous = previous_message(_decode(fields.get(THREAD)))
    if previous is None:
        return None
    if recall.is_foreign(previous):
        message = f"Previous message with id '{previous}' not found."
        raise bad_request(message, param="thread.previous_message_id")
    try:
        items = recall.conversation(previous)
    except ApiError:  # more than a request may hold
        items = None
    if items is None:
        recall.is_known(previous)
        return NamedBefore(body, recall.used, whole=False)
    head, *messages = items
    former = msgspec.json.decode(head, type=dict[str, msgspec.Raw])
    new_messages = _decode(fields.get("messages"))
    if not isinstance(new_messages, list) or msgspec.json.decode(former.get("type", msgspec.Raw(b"null"))) != THREAD:
        return NamedBefore(body, recall.used, whole=False)
    all_messages = msgspec.Raw(b"[" + b",".join([*messages, *map(msgspec.json.encode, new_messages)]) + b"]")
    settings = {name: former[name] for name in HEAD if name in former and _decode(fields.get(name)) is None}
    return NamedBefore(msgspec.json.encode({**fields, **settings, "messages": all_messages}), recall.used)


def to_store(body: bytes, thread: object) -> StoredRequest | None:
    """What is kept of a whole turn; None for a request without a thread."""
    if not isinstance(thread, Mapping):
        return None
    fields = msgspec.json.decode(body, type=dict[str, Any])
    head = {"type": THREAD, **{name: fields[name] for name in HEAD if fields.get(name) is not None}}
    return StoredRequest(
        [msgspec.json.encode(head), *map(msgspec.json.encode, fields["messages"])],
        previous_message(thread),
    )


def flatten(body: bytes) -> bytes:
    """A whole turn for an upstream that has nothing of its thread."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields.pop(THREAD, None)
    return msgspec.json.encode(fields)


def _fields(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _decode(raw: msgspec.Raw | None) -> Json:
    return None if raw is None else msgspec.json.decode(raw)
