"""Which messages count as the same: clients drop thoughts, write arguments anew and move whitespace when they echo.

A key holds a message's role, its text stripped, and of each tool call the id, the name and the canonical arguments
(sorted keys, 1.0 equal to 1). The text beside calls is left out of the key, since some clients lose it; `same_text`
compares it where it was kept. Thoughts, names and extra keys never count.

A chain of digests over the keys names every prefix of a conversation, tools included."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import orjson

from producers.gateway.rendering.base import Message, Tools

SIZE = 16


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and whole floats as integers."""
    return orjson.dumps(_whole(value), option=orjson.OPT_SORT_KEYS)


def canonical_json(data: bytes | str) -> bytes:
    """`canonical` of JSON text; text that is no JSON stays as it is, stripped."""
    try:
        return canonical(orjson.loads(data))
    except orjson.JSONDecodeError:
        return data.strip() if isinstance(data, bytes) else data.strip().encode()


def message_key(message: Message) -> bytes:
    """What identifies a message."""
    calls = message.get("tool_calls")
    if calls:
        parts: list[Any] = [
            [call["id"], call["function"]["name"], canonical_json(call["function"]["arguments"]).decode()]
            for call in calls
        ]
        return orjson.dumps([message["role"], parts])
    return orjson.dumps([message["role"], message.get("tool_call_id"), message["content"].strip()])


def same_text(stored: str, echoed: str) -> bool:
    """Whether an echo beside tool calls may stand for the stored text: equal, or lost by the client."""
    echoed = echoed.strip()
    return not echoed or echoed == stored.strip()


def start(tools: Tools) -> bytes:
    """The digest before the first message."""
    return blake2b(canonical(tools) if tools else b"", digest_size=SIZE).digest()


def extend(digest: bytes, message: Message) -> bytes:
    """The digest after one more message."""
    return blake2b(digest + message_key(message), digest_size=SIZE).digest()


def chain(messages: Sequence[Message], tools: Tools) -> list[bytes]:
    """The digest of every prefix: entry i is that of the first i messages."""
    out = [start(tools)]
    for message in messages:
        out.append(extend(out[-1], message))
    return out


def request_hash(body: bytes) -> bytes:
    """What a retry of a request has in common with it."""
    return blake2b(canonical_json(body), digest_size=SIZE).digest()


def _whole(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {name: _whole(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_whole(inner) for inner in value]
    return value
