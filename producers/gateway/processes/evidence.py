"""What a request says of the conversation that it belongs to, read on its way to the process that holds it.

The headers and the path are looked at first; a body only where they do not say. Of a body no more is understood than
that takes: the messages before the first reply, of which a new conversation and all that goes on from it have the same,
and ids.

Invariants: nothing here raises for what a client sent: who answers the request says what is wrong with it; the head of
a conversation is one in every API, and does not change as the conversation goes on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from millrace.dialects import match_keys
from millrace.dialects.all import DIALECTS
from millrace.dialects.base import Dialect
from millrace.dialects.conversation import messages_of
from millrace.dialects.errors import ApiError
from millrace.dialects.reading.head import read_head
from millrace.producers.gateway.http.callers import key_of
from millrace.producers.gateway.processes.owner import Evidence
from millrace.producers.gateway.sessions.ownership import hints
from millrace.producers.gateway.sessions.sessions import KEY_PREFIX
from millrace.schemas.json_values import Json

Reads: TypeAlias = Dialect | Literal["start", "feedback"] | None
"""which body says whose a request is, None: there is nothing more to read"""
ASKED_FIRST = ("system", "developer", "user")
"""who speaks before the first reply"""
SAYS = ("model", "system", "instructions", "max_tokens")
"""fields of a request that are understood beside its messages"""
_ABOUT = re.compile(r"/v1/sessions/([^/]+)/(?:reward|events|end)")
_CALL_ID = re.compile(rb'"(?:id|tool_call_id|tool_use_id|call_id)"\s*:\s*"(call_[0-9a-f]{24})"')
_DIALECTS = {dialect.path: dialect for dialect in DIALECTS}


class AtTheDoor(NamedTuple):
    """What is known of a request before its body, and whether that is to be read."""

    evidence: Evidence
    reads: Reads = None


class _Speaker(msgspec.Struct):
    role: Any = None


class _Start(msgspec.Struct):
    attempt: str | None = None
    parent: str | None = None


class _Feedback(msgspec.Struct):
    session: str | None = None
    response_id: str | None = None


def at_the_door(method: str, path: str, headers: Mapping[str, str]) -> AtTheDoor:
    """What the headers of a request and its path say, which has no name in it any more. Raises ApiError 400 for a name
    too long."""
    if (key := key_of(headers)).startswith(KEY_PREFIX):
        return AtTheDoor(Evidence(exact=key))
    if (about := _ABOUT.fullmatch(path)) is not None:
        return AtTheDoor(Evidence(name=about.group(1)))
    if method == "POST" and path in ("/v1/sessions", "/v1/feedback"):
        return AtTheDoor(Evidence(), "start" if path == "/v1/sessions" else "feedback")
    dialect = _DIALECTS.get(path)
    if (name := hints(headers).name) is not None and (path.startswith("/v1/embeddings") or _is_of_dialect(path)):
        return AtTheDoor(Evidence(name=name))
    if dialect is not None and method == "POST":
        return AtTheDoor(Evidence(), dialect)
    below = next((path[len(at) + 1 :] for at in _DIALECTS if path.startswith(f"{at}/")), "")
    # The response that a path is about; POST asks below it for no response, as `count_tokens`.
    return AtTheDoor(Evidence(exact=below.partition("/")[0]) if below and method != "POST" else Evidence())


def ids_in(dialect: Dialect, body: bytes) -> list[str]:
    """The ids by which a call names what was said before; none where it cannot be read."""
    try:
        return dialect.named_in(body)
    except (ApiError, UnicodeDecodeError, RecursionError):
        return []


def in_the_body(reads: Reads, body: bytes) -> Evidence:
    """What the body of a request says whose headers do not."""
    try:
        match reads:
            case None:
                return Evidence()
            case "start":
                start = msgspec.json.decode(body or b"{}", type=_Start)
                return Evidence(exact=start.parent) if start.parent else Evidence(attempt=start.attempt)
            case "feedback":
                feedback = msgspec.json.decode(body or b"{}", type=_Feedback)
                return Evidence(name=feedback.session) if feedback.session else Evidence(exact=feedback.response_id)
            case _:
                return _of_call(reads, body)
    except (ApiError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Evidence()


def _is_of_dialect(path: str) -> bool:
    return any(path == at or path.startswith(f"{at}/") for at in _DIALECTS)


def _of_call(dialect: Dialect, body: bytes) -> Evidence:
    _, name = dialect.names(read_head(body))
    if name is not None:
        return Evidence(name=name)
    if ids := dialect.named_in(body):
        return Evidence(exact=ids[0])
    call_ids = tuple(dict.fromkeys(id.decode() for id in _CALL_ID.findall(body)))
    return Evidence(call_ids=call_ids, head=head_of(dialect, body))


def head_of(dialect: Dialect, body: bytes) -> bytes | None:
    """A digest of the messages before the first reply; None for a request of none, as legacy completions are."""
    members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    field = next((field for field in ("messages", "input") if field in members), None)
    if field is None:
        return None
    before = _before_reply(members[field])
    few = {name: members[name] for name in SAYS if name in members} | {field: before}
    digest = blake2b(digest_size=match_keys.SIZE)
    try:
        for message in messages_of(dialect.parse(msgspec.json.encode(few)).turns, strict=False):
            if message["role"] != "assistant":
                digest.update(match_keys.message_key(message))
    except ApiError:  # what only an upstream understands, or what begins with a reply
        digest.update(msgspec.json.encode(before))
    return digest.digest()


def _before_reply(messages: msgspec.Raw) -> Json:
    if bytes(messages).lstrip()[:1] != b"[":
        return messages
    out = []
    for message in msgspec.json.decode(messages, type=list[msgspec.Raw]):
        if msgspec.json.decode(message, type=_Speaker).role not in ASKED_FIRST:
            break
        out.append(message)
    return out
